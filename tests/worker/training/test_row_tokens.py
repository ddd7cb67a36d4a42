"""What is learned is what serving would have the model write, and nothing else, in each template.

The slow reference looks at one learned message at a time: it takes the request that would have been
sent at its place through the gateway's schema and the worker's admission, and lets the template
write the answer. Each learned token with all tokens before it must be the reference's, and each of
the reference's must be learned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from contract.training.chat_rows import lint
from contract.training.row_messages import Row, WrongRow, read_row
from engine.text.chat_rendering import plain_messages
from engine.text.codec import TextCodec
from tests.chat_templates import TEMPLATES, write_tokenizer
from tests.messages import make_job
from worker.serving.engine_commands import chat_token_ids
from worker.training.row_tokens import RowTokens, cut, encode_row

CALL = {"id": "call_12345", "type": "function"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"properties": {"a": {}}}},
}


def text() -> st.SearchStrategy[str]:
    """Contents with blanks at their edges, special tokens, marks of templates, other scripts."""
    pieces = ["hello", " world", "\n", "  ", "é", "🦜", "<|im_end|>", "</s>", "[INST]", "{", "ab"]
    return st.lists(st.sampled_from(pieces), min_size=1, max_size=5).map("".join)


def said() -> st.SearchStrategy[str]:
    return st.builds("{}{}".format, st.sampled_from(["", "<think>\nso\n</think>\n\n"]), text())


def content(draw: st.DrawFn, value: st.SearchStrategy[str]) -> Any:
    drawn = draw(value)
    return drawn if draw(st.booleans()) else [{"type": "text", "text": drawn}]


@st.composite
def chats(draw: st.DrawFn) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        role = draw(st.sampled_from(["system", "developer"]))
        messages.append({"role": role, "content": content(draw, text())})
    has_tools = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": content(draw, text())})
        weight = draw(st.sampled_from([{}, {"weight": 0}, {"weight": 1}]))
        if has_tools and draw(st.booleans()):
            arguments = draw(st.sampled_from(['{"a": 1}', '{"a": "é\\n"}', "{}"]))
            ids = ["call_12345", "call_67890"][: draw(st.integers(1, 2))]
            function = {"name": "add", "arguments": arguments}
            calls = [{"id": each, "type": "function", "function": function} for each in ids]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls} | weight)
            messages += [{"role": "tool", "tool_call_id": each, "content": "3"} for each in ids]
            weight = draw(st.sampled_from([{}, {"weight": 0}]))
        # The gateway takes an empty answer; a row must not have one.
        answer = said().filter(lambda value: bool(value.split("</think>")[-1].strip()))
        thought = draw(st.sampled_from([{}, {"reasoning_content": "so"}]))
        messages.append({"role": "assistant", "content": content(draw, answer)} | thought | weight)
    return {"messages": messages} | ({"tools": [TOOL]} if has_tools else {})


@pytest.fixture(scope="module", params=TEMPLATES)
def codec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_tokenizer(tmp_path_factory.mktemp("base"), request.param))


def learned(examples: list[RowTokens]) -> set[tuple[int, ...]]:
    """Each learned token with all before it."""
    return {
        tuple(example.token_ids[: at + 1])
        for example in examples
        for span in example.learned
        for at in span
    }


def reference(codec: TextCodec, row: dict[str, Any]) -> set[tuple[int, ...]]:
    from controlplane.inference.schemas import ChatBody

    given_messages = [{k: m[k] for k in m if k != "weight"} for m in row["messages"]]
    tools = {"tools": row["tools"]} if "tools" in row else {}

    def request(number: int) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
        body = ChatBody(model="m", messages=given_messages[:number], **tools)
        return body.rendered_messages(), tuple(t.rendered() for t in body.callable_tools()[0])

    found: set[tuple[int, ...]] = set()
    for at, message in enumerate(row["messages"]):
        if message["role"] != "assistant" or message.get("weight", 1) == 0:
            continue
        messages, its_tools = request(at)
        job = make_job(messages=messages, tools=its_tools, tool_schemas=("{}",) * len(its_tools))
        prompt = chat_token_ids(job, codec)
        answer = answer_of(codec, *request(at + 1), prompt, at)
        found |= {tuple(prompt + answer[: end + 1]) for end in range(len(answer))}
    return found


def answer_of(codec: TextCodec, messages: Any, tools: Any, prompt: list[int], at: int) -> list[int]:
    """The answer as the template writes it, its text's characters one by one the assistant's."""
    if not codec.takes_tools:
        messages, tools = plain_messages(messages, tools), ()
        at = len(messages) - 1
    before = codec.render(messages[:at], tools).text
    text = codec.render(messages, tools, generation_prompt=False).text[len(before) :]
    whole = codec.encode_chat(codec.render(messages, tools, generation_prompt=False))
    if whole[: len(prompt)] == prompt:
        answer = whole[len(prompt) :]
    else:
        answer = without_special(codec, text)
    end = codec.end_id
    if end in answer:  # nothing is written after the end of a turn
        return answer[: len(answer) - answer[::-1].index(end)]
    while answer and not codec.decode_whole(answer[-1:]).strip():
        answer.pop()
    return answer


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(row=chats())
def test_exactly_the_weighted_answers_tokens_are_learned(
    codec: TextCodec, row: dict[str, Any]
) -> None:
    try:
        read = read_row(json.loads(json.dumps(row)))
    except WrongRow as wrong:
        assert "weight is not 0" in str(wrong)
        weights = [m.get("weight", 1) for m in row["messages"] if m["role"] == "assistant"]
        assert not any(weights)
        return
    if not codec.takes_thoughts and any("reasoning_content" in each for each in read.messages):
        with pytest.raises(ValueError, match="does not know messages"):
            encode_row(codec, read)
        return
    examples = encode_row(codec, read)
    assert learned(examples) == reference(codec, row)
    assert sum(example.num_learned for example in examples) == len(learned(examples))


@settings(max_examples=40, deadline=None)
@given(row=chats())
def test_a_row_reaches_the_template_as_a_request_does(row: dict[str, Any]) -> None:
    from controlplane.inference.schemas import ChatBody

    try:
        read = read_row(json.loads(json.dumps(row)))
    except WrongRow:
        return
    messages = [{k: m[k] for k in m if k != "weight"} for m in row["messages"]]
    body = ChatBody(model="m", messages=messages, tools=row.get("tools"))
    assert json.dumps(read.messages) == json.dumps(body.rendered_messages())
    tools = tuple(tool.rendered() for tool in body.callable_tools()[0])
    assert json.dumps(read.tools) == json.dumps(tools)


def without_special(codec: TextCodec, text: str) -> list[int]:
    """The tokens of a text of the assistant's in which only the end of the turn is special."""
    assert codec.end_id is not None
    end = codec.names([codec.end_id])[0]
    harmless = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if not codec.render(harmless, generation_prompt=False).text.rstrip().endswith(end):
        end = ""  # the template writes none
    own = text.rpartition(end)[0] if end else text
    state = json.loads(codec._tokenizer.to_str()) | {"added_tokens": []}
    ids: list[int] = Tokenizer.from_str(json.dumps(state)).encode(own).ids
    return [*ids, codec.end_id] if end else ids


CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "world"},
    {"role": "assistant", "content": "two"},
]


def chat(**weights: float) -> Row:
    rows = [dict(message) for message in CHAT]
    for content_, weight in weights.items():
        next(m for m in rows if m["content"] == content_)["weight"] = weight
    return read_row({"messages": rows})


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        ("chatml", [["one<|im_end|>", "two<|im_end|>"]]),
        # This tokenizer reads the line breaks before an answer as one token, unless text follows.
        ("llama3", [["one<|eot|>"], ["two<|eot|>"]]),
        ("mistral", [[" one</s>"], [" two</s>"]]),
        ("qwen2", [["one<|im_end|>", "two<|im_end|>"]]),
        (
            "qwen3",
            [
                ["<think>\n\n</think>\n\none<|im_end|>"],
                ["<think>\n\n</think>\n\ntwo<|im_end|>"],
            ],
        ),
    ],
)
def test_answers_as_each_family_writes_them(
    tmp_path: Path, template: str, answers: list[list[str]]
) -> None:
    """A template that changes earlier turns gives an example a turn; others give one for all."""
    codec = TextCodec(write_tokenizer(tmp_path, template))

    def texts(row: Row) -> list[list[str]]:
        return [
            [codec.decode_whole(part.token_ids[s.start : s.stop]) for s in part.learned]
            for part in encode_row(codec, row)
        ]

    assert texts(chat()) == answers
    assert texts(chat(one=0)) == [answers[-1][-1:]]
    assert texts(chat(two=0.0, one=1)) == [answers[0][:1]]


def test_an_answer_to_the_system_alone_is_learned_where_the_template_writes_it(
    codec: TextCodec,
) -> None:
    system = {"role": "system", "content": "Be positive."}
    row = {"messages": [system, {"role": "assistant", "content": "hello world"}]}
    if "Be positive." not in codec.render([system], ()).text:  # Mistral's is a part of the user's
        with pytest.raises(ValueError, match="leaves out a system's message"):
            encode_row(codec, read_row(row))
        return
    assert learned(encode_row(codec, read_row(row))) == reference(codec, row)


def test_a_system_beside_the_messages_is_rendered_as_their_first(codec: TextCodec) -> None:
    beside = read_row({"system": "s", "messages": CHAT[1:]})
    assert encode_row(codec, beside) == encode_row(codec, read_row({"messages": CHAT}))


def test_a_completion_is_learned_to_the_end_of_its_text(codec: TextCodec) -> None:
    (part,) = encode_row(codec, read_row({"prompt": "hello world,", "completion": " how are"}))
    (span,) = part.learned
    assert part.token_ids[: span.start] == codec.encode("hello world,", add_special_tokens=True)
    assert codec.decode(part.token_ids[span.start :]) == " how are"
    assert part.token_ids[-1] == codec.end_id and span.stop == len(part.token_ids)


def test_a_cut_part_keeps_what_is_left_to_learn() -> None:
    part = RowTokens(list(range(10)), [range(2, 4), range(6, 9)])
    assert list(cut([part], 10)) == [part]
    assert list(cut([part], 7)) == [RowTokens(list(range(7)), [range(2, 4), range(6, 7)])]
    assert list(cut([part], 2)) == []


def test_a_row_of_weight_0_is_an_error_on_its_line() -> None:
    rows = [{"messages": CHAT}, {"messages": [m | {"weight": 0} for m in CHAT]}]
    (problem,) = lint("\n".join(map(json.dumps, rows)).encode()).problems
    assert str(problem).startswith("line 2: messages must have a message of the assistant whose")


def test_thoughts_are_learned_unless_they_are_skipped(tmp_path: Path) -> None:
    """A template leaves earlier ones out, and a call's answer is thought of, too."""
    codec = TextCodec(write_tokenizer(tmp_path, "qwen3"))
    first, last = ({"reasoning_content": each} for each in ("hm", "so"))
    messages = [*CHAT[:2], CHAT[2] | first, CHAT[3], CHAT[4] | last]
    row = read_row({"messages": messages})

    def texts(**options: Any) -> list[str]:
        return [
            codec.decode_whole(part.token_ids[span.start : span.stop])
            for part in encode_row(codec, row, **options)
            for span in part.learned
        ]

    assert texts() == [
        "<think>\nhm\n</think>\n\none<|im_end|>",
        "<think>\nso\n</think>\n\ntwo<|im_end|>",
    ]
    assert texts(skip_thoughts=True) == ["\n\none<|im_end|>", "\n\ntwo<|im_end|>"]
    assert "hm" not in codec.decode_whole(encode_row(codec, row)[-1].token_ids)


def test_a_thought_of_gpt_oss_is_a_message_before_the_answer(tmp_path: Path) -> None:
    codec = TextCodec(write_tokenizer(tmp_path, "harmony"))
    row = read_row({"messages": [*CHAT[:2], CHAT[2] | {"reasoning_content": "hm"}]})
    for skips, wanted in (
        (False, "<|channel|>analysis<|message|>hm<|end|>" + (rest := "<|start|>assistant")),
        (True, rest),
    ):
        [part] = encode_row(codec, row, skip_thoughts=skips)
        learned = [part.token_ids[i] for span in part.learned for i in span]
        assert codec.decode_whole(learned) == f"{wanted}<|channel|>final<|message|>one<|return|>"
