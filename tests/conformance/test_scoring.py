"""Log-probabilities of prompts and of what follows them, and tokens without an answer, as clients
of OpenAI and vLLM ask for them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conformance.conftest import Served, say
from tests.fakes import FAKE_NAME
from tests.tiny_base import ROOMY_CONTEXT, ROOMY_NAME, write_tiny_base

TOOL = {"type": "function", "function": {"name": "look"}}
CALLED_BY_NOBODY = [{"role": "tool", "tool_call_id": "c1", "content": "x"}]
TEXT = "hello world, how are you? {json: 12} I’m ☃ fine\n"


class Base:
    """Hugging Face over the same base model."""

    def __init__(self, folder: Path) -> None:
        import torch
        from tokenizers import Tokenizer
        from transformers import AutoModelForCausalLM

        write_tiny_base(folder, name=ROOMY_NAME, context=ROOMY_CONTEXT)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def logprobs(self, token_ids: list[int]) -> list[float]:
        """Of each token but the first."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([token_ids])).logits[0]
        table = logits.log_softmax(-1)
        return [float(table[i, token]) for i, token in enumerate(token_ids[1:])]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(tmp_path_factory.mktemp("oracle"))


def post(served: Served, path: str, tenant: str = "acme", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {served.key(tenant)}"}
    return httpx.post(f"{served.url}{path}", json=body, headers=headers, timeout=60)


def echoed(served: Served, prompt: Any, **fields: Any) -> Any:
    given = {"max_tokens": 1, "temperature": 0.0, "logprobs": 1, "echo": True, **fields}
    return served.client().completions.create(model=ROOMY_NAME, prompt=prompt, **given)


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "token-ids"])
def test_an_echoed_prompt_is_scored(served: Served, base: Base, is_text: bool) -> None:
    token_ids = base.ids(TEXT)
    answer = echoed(served, TEXT if is_text else token_ids)
    [choice] = answer.choices
    found = choice.logprobs
    assert choice.text.startswith(TEXT)
    assert len(found.tokens) == len(token_ids) + 1
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1:-1] == pytest.approx(base.logprobs(token_ids), abs=1e-4)
    for token, logprob, top in list(
        zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    )[1:]:
        assert token in top and logprob <= max(top.values()) + 1e-6
        assert 1 <= len(top) <= 2
    assert answer.usage.prompt_tokens == len(token_ids)
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("is_text", [True, False], ids=["text", "token-ids"])
def test_offsets_lead_to_the_tokens(served: Served, base: Base, is_text: bool) -> None:
    token_ids = base.ids(TEXT)
    [choice] = echoed(served, TEXT if is_text else token_ids, max_tokens=6, logprobs=0).choices
    found = choice.logprobs
    assert found.text_offset[0] == 0
    assert found.text_offset == sorted(found.text_offset)
    assert found.text_offset[len(token_ids)] == len(TEXT)
    for i, (token, at) in enumerate(zip(found.tokens, found.text_offset, strict=True)):
        if "<|" not in token and not token.startswith("bytes:"):
            assert choice.text.startswith(token, at), i


def test_a_special_token_in_an_echoed_text_has_its_place(served: Served, base: Base) -> None:
    text = "hello<|im_end|> you"
    [choice] = echoed(served, text, max_tokens=0).choices
    found = choice.logprobs
    assert choice.text == text
    for token, at in zip(found.tokens, found.text_offset, strict=True):
        assert text.startswith(token, at)


def test_the_prompt_alone_is_scored_and_nothing_generated(served: Served, base: Base) -> None:
    for fields in ({"logprobs": 2}, {"logprobs": None}):
        answer = echoed(served, [TEXT, "hello"], max_tokens=0, n=2, **fields)
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT, "hello", "hello"]
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert answer.usage.completion_tokens == 0
        for choice in answer.choices if fields["logprobs"] else ():
            expected = base.logprobs(base.ids(choice.text))
            assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)


def test_a_stream_begins_with_the_scored_prompt(served: Served, base: Base) -> None:
    token_ids = base.ids(TEXT)
    stream = echoed(served, TEXT, max_tokens=3, stream=True)
    text, logprobs, offsets = "", [], []
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            if choice.logprobs is not None:
                logprobs += choice.logprobs.token_logprobs
                offsets += choice.logprobs.text_offset
    assert text.startswith(TEXT) and offsets == sorted(offsets)
    expected = base.logprobs(token_ids)
    assert logprobs[1 : len(token_ids)] == pytest.approx(expected, abs=1e-4)
    assert len(token_ids) < len(logprobs) <= len(token_ids) + 3


def test_an_end_counts_as_a_token_of_an_echo(served: Served) -> None:
    """lm-eval drops the last entry, as that of the one generated token."""
    fields: dict[str, Any] = {"logit_bias": {"2": 100}, "max_tokens": 1}
    [choice] = echoed(served, TEXT, **fields).choices
    assert (choice.finish_reason, choice.text) == ("stop", TEXT)
    assert choice.logprobs.tokens[-1] == "<|im_end|>"
    assert choice.logprobs.text_offset[-1] == len(TEXT)
    # Without an echo there is an entry for each token of the text, as before.
    [choice] = echoed(served, TEXT, echo=False, **fields).choices
    assert choice.logprobs is None


def test_multiple_choice_as_lm_eval_asks_for_it(served: Served, base: Base) -> None:
    """Its TemplateAPI: token ids of context and continuation, and the slice [ctxlen:-1]."""
    context, endings = base.ids("hello world, how are"), [" you?", " {json", "12"]
    prompts = [context + base.ids(ending) for ending in endings]
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    out = post(served, "/v1/completions", model=ROOMY_NAME, prompt=prompts, **body).json()
    choices = sorted(out["choices"], key=lambda choice: choice["index"])
    for prompt, choice in zip(prompts, choices, strict=True):
        found = choice["logprobs"]
        scored = slice(len(context), -1)
        expected = base.logprobs(prompt)[len(context) - 1 :]
        assert sum(found["token_logprobs"][scored]) == pytest.approx(sum(expected), abs=1e-3)
        assert len(found["tokens"][scored]) == len(prompt) - len(context)
        for token, top in zip(found["tokens"][scored], found["top_logprobs"][scored], strict=True):
            assert token in top


def test_the_likeliest_token_is_told_where_tokens_are_parts_of_characters(
    served: Served, base: Base
) -> None:
    """lm-eval calls an answer greedy if each token is the likeliest key of `top_logprobs`."""
    prompt = "La f\u00eate \U0001f389\U0001f973 \u65e5\u672c"
    answer = post(
        served, "/v1/completions", model=ROOMY_NAME, prompt=prompt, echo=True, max_tokens=0,
        logprobs=5, prompt_logprobs=5,
    ).json()  # fmt: skip
    [choice] = answer["choices"]
    found = choice["logprobs"]
    parts = [token for token in found["tokens"] if token.startswith("bytes:")]
    assert len(parts) > 8
    for token, own, top, by_id in list(
        zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"],
            choice["prompt_logprobs"], strict=True,
        )
    )[1:]:  # fmt: skip
        assert top[token] == own
        assert sorted(top.values()) == sorted(entry["logprob"] for entry in by_id.values())
        assert token.isascii() or base.ids(token)  # a part of a character is written in ASCII


@pytest.mark.parametrize("asked", [0, 2])
def test_the_sampled_token_is_always_among_the_alternatives(served: Served, asked: int) -> None:
    """A bias makes one that is not among the likeliest."""
    answer = served.client().completions.create(
        model=ROOMY_NAME, prompt="hello", max_tokens=5, logprobs=asked, logit_bias={"100": 100}
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.top_logprobs is not None
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == logprob
        assert len(top) <= asked + 1


def test_prompt_logprobs_in_vllms_shape(served: Served, base: Base) -> None:
    token_ids = base.ids(TEXT)
    body = {"model": ROOMY_NAME, "max_tokens": 1, "prompt_logprobs": 2}
    completion = post(served, "/v1/completions", prompt=TEXT, **body).json()
    found = completion["choices"][0]["prompt_logprobs"]
    chat = post(served, "/v1/chat/completions", messages=say("hello"), **body).json()
    for entries, expected in ((found, token_ids), (chat["prompt_logprobs"], None)):
        assert entries[0] is None
        for i, entry in enumerate(entries[1:], start=1):
            assert 2 <= len(entry) <= 3
            ranks = sorted(own["rank"] for own in entry.values())
            assert ranks[:2] == [1, 2]
            assert all(isinstance(own["decoded_token"], str) for own in entry.values())
            if expected is not None:
                assert str(expected[i]) in entry
    own = [
        entry[str(token)]["logprob"] for token, entry in zip(token_ids, found, strict=True) if entry
    ]
    assert own == pytest.approx(base.logprobs(token_ids), abs=1e-4)
    plain = post(served, "/v1/completions", model=ROOMY_NAME, prompt=TEXT, max_tokens=1).json()
    assert "prompt_logprobs" not in plain["choices"][0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": ["a " * 900] * 40, "echo": True, "logprobs": 5}, "logprobs"),
        ({"prompt": ["a " * 900] * 40, "prompt_logprobs": 5}, "prompt_logprobs"),
    ],
    ids=["above-20", "stream", "nothing-asked", "too-many-echoed", "too-many"],
)
def test_what_cannot_be_scored_is_refused_by_its_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    body = {"model": ROOMY_NAME, "prompt": "a", "max_tokens": 1, **fields}
    answer = post(served, "/v1/completions", **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


# Tokens


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokens_and_back(served: Served, base: Base, prefix: str) -> None:
    answer = post(
        served, f"{prefix}/tokenize", model=ROOMY_NAME, prompt=TEXT, return_token_strs=True
    )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["tokens"] == base.ids(TEXT)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == ROOMY_CONTEXT
    assert found["token_strs"] == [base.tokenizer.id_to_token(i) for i in found["tokens"]]
    back = post(served, f"{prefix}/detokenize", model=ROOMY_NAME, tokens=found["tokens"])
    assert back.json() == {"prompt": TEXT}


def test_a_chats_tokens_are_its_prompts(served: Served, base: Base) -> None:
    messages = say("hello, how are you?")
    found = post(served, "/tokenize", model=ROOMY_NAME, messages=messages).json()
    answer = served.client().chat.completions.create(
        model=ROOMY_NAME, messages=messages, max_tokens=1
    )
    assert answer.usage is not None
    assert found["count"] == answer.usage.prompt_tokens
    assert found["token_strs"] is None
    plain = post(
        served, "/tokenize", model=ROOMY_NAME, messages=messages, add_generation_prompt=False
    ).json()
    text = post(served, "/detokenize", model=ROOMY_NAME, tokens=found["tokens"]).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\n")
    assert found["tokens"][: plain["count"]] == plain["tokens"]
    assert text.removesuffix("<|im_start|>assistant\n").endswith("<|im_end|>\n")


def test_a_chats_tools_count(served: Served) -> None:
    messages = say("hello, how are you?")
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    found = post(served, "/v1/tokenize", model=ROOMY_NAME, messages=messages, tools=tools)
    assert found.status_code == 200, found.text
    answer = served.client().chat.completions.create(
        model=ROOMY_NAME, messages=messages, tools=tools, max_tokens=1
    )
    assert answer.usage is not None
    assert found.json()["count"] == answer.usage.prompt_tokens


def test_a_text_that_would_keep_a_worker_busy_is_refused_before_one_has_it(served: Served) -> None:
    """Four of 8 MB took the only worker from all tenants for minutes."""
    started = time.monotonic()
    answer = post(served, "/tokenize", model=ROOMY_NAME, prompt="a" * 7_900_000)
    assert answer.status_code == 413, answer.text
    assert time.monotonic() - started < 10


def test_a_long_text_is_counted_though_no_prompt_may_be_so_long(served: Served) -> None:
    found = post(served, "/tokenize", model=ROOMY_NAME, prompt="hello " * 6000).json()
    assert found["count"] > ROOMY_CONTEXT
    assert post(served, "/tokenize", model=ROOMY_NAME, prompt="").json()["tokens"] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"inputs": "a"}, "inputs"),
        ("/tokenize", {"prompt": "☃" * 300_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"messages": CALLED_BY_NOBODY}, "messages.0.tool_call_id"),
        ("/tokenize", {"messages": say("x"), "tools": [TOOL, TOOL]}, "tools.1.function.name"),
        ("/detokenize", {"tokens": [5000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [1] * 131_073}, "tokens"),
    ],
    ids=str,
)
def test_bad_bodies_are_refused_by_field(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    answer = post(served, path, model=ROOMY_NAME, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_tokens_need_a_key_and_are_billed_as_nothing(served: Served) -> None:
    for path in ("/tokenize", "/v1/detokenize"):
        answer = httpx.post(f"{served.url}{path}", json={"model": ROOMY_NAME, "prompt": "a"})
        assert answer.status_code == 401
        assert httpx.get(f"{served.url}{path}").status_code == 405
    answer = post(served, "/tokenize", model="no-such-model", prompt="a")
    assert answer.status_code == 404
    echo = post(served, "/tokenize", model=FAKE_NAME, prompt="one two")
    assert echo.status_code == 200
    headers = {"authorization": f"Bearer {served.key()}"}
    url = f"{served.url}/api/v1/requests/{echo.headers['x-request-id']}/usage"
    for _ in range(100):
        usage = httpx.get(url, headers=headers)
        if usage.status_code == 200:
            break
        time.sleep(0.1)
    billed = usage.json()
    assert (billed["prompt_tokens"], billed["completion_tokens"]) == (0, 0)
    assert billed["finish_reason"] == "stop"


def test_the_old_shape_of_refusals_is_the_clients(served: Served) -> None:
    with pytest.raises(openai.BadRequestError):
        served.client().completions.create(model=ROOMY_NAME, prompt="a", logprobs=6)
