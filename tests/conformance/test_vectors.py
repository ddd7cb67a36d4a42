"""Embeddings through OpenAI's client, and labels as LoRAX's clients ask for them."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.conformance.conftest import Served, say
from tests.tiny_base import ROOMY_CONTEXT, ROOMY_NAME, write_tiny_base

TEXTS = ["hello world", "how are you? {json: 12}", "I’m ☃ fine\n"]
LABELS = ("good", "bad", "neither")
#: The adapter of acme with a head, and one without.
CLASSIFIER, PLAIN = "moods", "tones"


class Oracle:
    """transformers and PEFT over the same base and adapters."""

    def __init__(self, folder: Path) -> None:
        import torch
        from tokenizers import Tokenizer

        from tests.engine.classifiers import save_classifier
        from tests.engine.conftest import LINEARS, save_adapter

        self._torch = torch
        self.base = write_tiny_base(folder / "base", name=ROOMY_NAME, context=ROOMY_CONTEXT)
        self.tokenizer = Tokenizer.from_file(str(self.base / "tokenizer.json"))
        self.classifier = save_classifier(self.base, folder / "head", 3, labels=LABELS)
        lora: Any = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS}
        self.plain = save_adapter(self.base, folder / "plain", 1, **lora)
        config = self.plain / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"pooling": "mean"}))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def vector(self, token_ids: list[int], adapter: Path | None = None) -> Any:
        """Of the last token; with the adapter the mean of all."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=self._torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter).get_base_model()
        with self._torch.inference_mode():
            states = model.model(self._torch.tensor([token_ids])).last_hidden_state[0]
        pooled = states[-1] if adapter is None else states.mean(0)
        return (pooled / pooled.norm()).numpy()

    def shares(self, text: str) -> dict[str, float]:
        from tests.engine.classifiers import probabilities

        found = probabilities(self.base, self.classifier, self.ids(text), len(LABELS))
        return dict(zip(LABELS, found, strict=True))


@pytest.fixture(scope="module")
def oracle(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    found = Oracle(tmp_path_factory.mktemp("vectors"))
    tenant = served.live.tenants["acme"].id
    for name, folder in ((CLASSIFIER, found.classifier), (PLAIN, found.plain)):
        served.live.run("-m", "tests.live_adapter", tenant, f"{name}@{ROOMY_NAME}", str(folder))
    return found


def post(served: Served, path: str, tenant: str = "acme", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {served.key(tenant)}"}
    return httpx.post(f"{served.url}{path}", json=body, headers=headers, timeout=60)


def scores(told: Any) -> dict[str, float]:
    return {each["label"]: each["score"] for each in told}


def classify(served: Served, inputs: Any, adapter: str = CLASSIFIER, **more: Any) -> httpx.Response:
    parameters = {"adapter_id": adapter}
    return post(served, "/classify", inputs=inputs, parameters=parameters, **more)


# Embeddings


@pytest.mark.parametrize("model", [ROOMY_NAME, PLAIN])
def test_embeddings_are_transformers(served: Served, oracle: Oracle, model: str) -> None:
    """The client asks for base64 and decodes it; as floats they are the same."""
    client, adapter = served.client(), oracle.plain if model == PLAIN else None
    answer = client.embeddings.create(model=model, input=TEXTS)
    floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    assert (answer.object, answer.model) == ("list", model)
    for number, (text, own, other) in enumerate(zip(TEXTS, answer.data, floats.data, strict=True)):
        assert (own.index, own.object) == (number, "embedding")
        assert own.embedding == pytest.approx(other.embedding, abs=1e-7)
        assert own.embedding == pytest.approx(oracle.vector(oracle.ids(text), adapter), abs=1e-4)
        assert math.hypot(*own.embedding) == pytest.approx(1, abs=1e-5)
    total = sum(len(oracle.ids(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == total


def test_forms_of_the_input(served: Served, oracle: Oracle) -> None:
    client = served.client()
    ids = [oracle.ids(text) for text in TEXTS]
    expected = client.embeddings.create(model=ROOMY_NAME, input=TEXTS).data
    for given in (TEXTS[0], ids[0], ids, [TEXTS[0]]):
        answer = client.embeddings.create(model=ROOMY_NAME, input=given)
        for own, other in zip(answer.data, expected, strict=False):
            assert own.embedding == pytest.approx(other.embedding, abs=1e-5)
    short = client.embeddings.create(model=ROOMY_NAME, input=TEXTS[0], dimensions=4, user="u")
    first = np.array(expected[0].embedding[:4])
    assert short.data[0].embedding == pytest.approx(first / np.linalg.norm(first), abs=1e-5)


def test_many_inputs_beside_a_chat(served: Served, oracle: Oracle) -> None:
    client = served.client()
    texts = [f"{TEXTS[i % 3]} {i}" for i in range(300)]
    answer = client.embeddings.create(model=PLAIN, input=texts)
    chat = client.chat.completions.create(model=PLAIN, messages=say("hello"), max_tokens=3)
    assert [each.index for each in answer.data] == list(range(300))
    vector = oracle.vector(oracle.ids(texts[299]), oracle.plain)
    assert answer.data[299].embedding == pytest.approx(vector, abs=1e-4)
    assert chat.usage is not None and chat.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ""}, "input", "empty"),
        ({"input": ["a", ""]}, "input", "empty"),
        ({"input": []}, "input", "1 to 2048 inputs"),
        ({"input": ["a"] * 2049}, "input", "1 to 2048 inputs"),
        ({"input": [[10**9]]}, "input", "token ids must be 0 to"),
        ({"input": "hello world " * 5000}, "input", "context is 4096"),
        ({"input": "a", "dimensions": 33}, "dimensions", "1 to 32"),
        ({"input": "a", "dimensions": 0}, "dimensions", "1"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "stream": True}, "stream", "Unrecognized"),
        ({"input": "a", "max_tokens": 4}, "max_tokens", "Unrecognized"),
        ({}, "input", "Missing required"),
    ],
)
def test_what_embeddings_refuse(
    served: Served, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = post(served, "/v1/embeddings", model=ROOMY_NAME, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert words in error["message"]


def test_who_may_embed(served: Served) -> None:
    client = served.client("globex")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=PLAIN, input="a")  # acme's
    with pytest.raises(openai.AuthenticationError):
        served.client(api_key="lk_live_wrong").embeddings.create(model=ROOMY_NAME, input="a")


def test_they_are_billed(served: Served, oracle: Oracle) -> None:
    raw = served.client().embeddings.with_raw_response.create(model=PLAIN, input=TEXTS)
    row = served.live.usage_row(raw.headers["x-request-id"])
    assert row["prompt_tokens"] == sum(len(oracle.ids(text)) for text in TEXTS)
    assert row["completion_tokens"] == 0 and str(row["adapter_version_id"])
    assert "x-ratelimit-limit-requests" in raw.headers or raw.headers["x-lorikeet-digest"]


def test_a_batch_of_them(served: Served, oracle: Oracle) -> None:
    client = served.client()
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": ROOMY_NAME, "input": text, **({"n": 1} if i == 2 else {})},
        }
        for i, text in enumerate(TEXTS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "expired") and time.monotonic() < until:
        time.sleep(0.3)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    assert batch.output_file_id is not None
    told = [json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()]
    for line in told:
        text = TEXTS[int(line["custom_id"])]
        [data] = line["response"]["body"]["data"]
        assert data["embedding"] == pytest.approx(oracle.vector(oracle.ids(text)), abs=1e-4)


# Labels


def test_labels_are_transformers(served: Served, oracle: Oracle) -> None:
    one, several = classify(served, TEXTS[0]), classify(served, TEXTS)
    assert one.status_code == several.status_code == 200, (one.text, several.text)
    assert scores(several.json()[0]) == pytest.approx(scores(one.json()), abs=1e-5)
    for text, told in zip(TEXTS, several.json(), strict=True):
        shares = oracle.shares(text)
        assert scores(told) == pytest.approx(shares, abs=1e-4)
        assert [each["label"] for each in told] == sorted(shares, key=shares.get, reverse=True)  # type: ignore[arg-type]
    named = f"{CLASSIFIER}/1"  # a repository and its version, as LoRAX's clients write it
    assert scores(classify(served, TEXTS[0], named).json()) == pytest.approx(scores(one.json()))


def test_labels_are_billed(served: Served, oracle: Oracle) -> None:
    answer = classify(served, TEXTS[0])
    row = served.live.usage_row(answer.headers["x-request-id"])
    assert row["prompt_tokens"] == len(oracle.ids(TEXTS[0]))
    assert row["completion_tokens"] == 0


def test_models_say_what_they_can(served: Served, oracle: Oracle) -> None:
    for name in (PLAIN, ROOMY_NAME):
        answer = classify(served, "a", name)
        assert answer.status_code == 422  # as LoRAX says that a request is wrong
        words = f"`{name}` has no classifier's head: it answers chats and gives embeddings."
        assert words in answer.json()["error"]
    calls: dict[str, Any] = {
        "/v1/chat/completions": {"messages": say("a")},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
    }
    for path, body in calls.items():
        answer = post(served, path, model=CLASSIFIER, **body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "model"), error
        assert error["message"].startswith(f"`{CLASSIFIER}` is a classifier with 3 labels")
    vector = served.client().embeddings.create(model=CLASSIFIER, input="a").data[0].embedding
    assert len(vector) == 32


def test_what_classify_refuses(served: Served, oracle: Oracle) -> None:
    wrong: list[Any] = [{"inputs": "a", "top_k": 3}, {"inputs": ""}, {"inputs": 3}, {"inputs": []}]
    for more in (*wrong, {}):
        body: Any = {"parameters": {"adapter_id": CLASSIFIER}, **more}
        assert post(served, "/classify", **body).status_code in (400, 422), more
    assert post(served, "/embed", inputs="a").json()["error"].startswith("/embed is not supported")
