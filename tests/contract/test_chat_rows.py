"""The lint names every wrong line, and the trainer takes what it passes."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from contract.row_formats.keys import NEUTRAL
from contract.training.chat_rows import MAX_LINE_BYTES, MAX_PROBLEMS, lint
from contract.training.row_messages import read_row

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def jsonl(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


GOOD = {"messages": [SYSTEM, USER, ASSISTANT]}


def learned(row: Any) -> list[str]:
    """What a row's learned messages say."""
    read = read_row(row)
    return [read.messages[index]["content"] for index in read.learned]


def test_a_good_dataset_has_rows_and_no_problems() -> None:
    content = jsonl(GOOD, {"messages": [USER, ASSISTANT, USER, ASSISTANT]}) + b"\n \r\n"
    assert (lint(content).num_rows, lint(content).problems) == (2, [])
    assert lint(content.replace(b"\n", b"\r\n")).problems == []
    assert lint(content.rstrip()).num_rows == 2


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (["messages"], "line 2 has neither `messages` nor `prompt`"),
        ("messages", "line 2 has neither `messages` nor `prompt`"),
        ({"body": {"messages": [USER, ASSISTANT]}}, "line 2 has neither `messages` nor `prompt`"),
        ({"messages": {}}, "line 2: messages must be a list"),
        ({"messages": []}, "line 2: messages must be a list"),
        ({"prompt": "u"}, "line 2: completion must be a string"),
        ({"prompt": "u", "completion": ""}, "line 2: completion must not be empty"),
        ({"messages": [USER, ASSISTANT], "functions": "f"}, "line 2: functions must be a list"),
        ({"messages": [USER, ASSISTANT], "parallel_tool_calls": 1}, "line 2: parallel_tool_calls"),
        ({"messages": [USER, ASSISTANT], "tools": [{}]}, "line 2: tools[0] must be a function"),
        ({"messages": [USER, ASSISTANT], "tools": [TOOL, TOOL]}, "line 2: tools[1].function.name"),
        ({"messages": [USER, ASSISTANT | {"weight": 2}]}, "line 2: messages[1].weight must be 0"),
        ({"messages": [USER, ASSISTANT | {"weight": True}]}, "line 2: messages[1].weight must"),
        ({"messages": [USER | {"weight": 1}, ASSISTANT]}, "line 2: messages[0].weight is allowed"),
        ({"messages": [USER, ASSISTANT | {"weight": 0}]}, "line 2: messages must have a message"),
        (
            {"messages": [USER, ASSISTANT | {"function_call": {"name": "f"}}]},
            "line 2: messages[1].tool_calls[0].function.name must be the name of one of the",
        ),
        (
            {"messages": [USER | {"tool_calls": [CALL]}, ASSISTANT]},
            "line 2: messages[0].tool_calls are allowed only",
        ),
        (
            {"messages": [USER, ASSISTANT, {"role": "tool", "tool_call_id": "c", "content": "1"}]},
            "line 2: messages[2].tool_call_id must be the id of an earlier",
        ),
        (
            {"messages": [USER, ASSISTANT | {"tool_calls": [CALL | {"id": 1}]}]},
            "line 2: messages[1].tool_calls[0].id must",
        ),
        (
            {"messages": [USER, ASSISTANT | {"content": [{"type": "image_url"}]}]},
            "line 2: messages[1].content[0] is not text, and the models read only text",
        ),
        ({"messages": [USER, "a"]}, "line 2: messages[1] must be an object"),
        ({"messages": [USER, {"role": "sage", "content": "a"}]}, "line 2: messages[1].role must"),
        ({"messages": [USER, {"role": ["user"]}]}, "line 2: messages[1].role must be one of"),
        ({"messages": [USER, {"role": "assistant"}]}, "line 2: messages[1].content must be a str"),
        (
            {"messages": [USER, ASSISTANT | {"content": " "}]},
            "line 2: messages[1].content must not",
        ),
        ({"messages": [ASSISTANT, USER]}, "line 2: messages must begin with a message of the sys"),
        ({"messages": [SYSTEM]}, "line 2: messages must have a message of the assistant"),
        ({"messages": [USER, USER]}, "line 2 has no answer, but the rows before have one answer"),
        (
            {"messages": [USER, ASSISTANT | {"weight": 0}, USER], "answer": 7},
            "line 2 has no answer, but the rows before have one answer: keep them in separate",
        ),
        (
            {"messages": [USER | {"mood": 1}, USER], "answer": 7},
            "line 2: messages[0].mood is not a known key",
        ),
    ],
)
def test_a_wrong_row_is_named_by_line_and_field(row: Any, expected: str) -> None:
    (problem,) = lint(jsonl(GOOD, row, GOOD)).problems
    assert str(problem).startswith(expected)


def test_rows_as_openai_has_them_are_good() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 1}
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "1"}]}
    rows = [
        {"messages": [USER, called, result, ASSISTANT], "tools": [TOOL]},
        {
            "messages": [
                {"role": "developer", "content": "d"},
                USER,
                ASSISTANT | {"weight": 0},
                USER,
                ASSISTANT,
            ],
            "parallel_tool_calls": False,
        },
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "no"}]},
        {"messages": [USER, ASSISTANT | {"content": [{"type": "refusal", "refusal": "no"}]}]},
        {"prompt": "u", "completion": " a"},
    ]
    assert (lint(jsonl(*rows)).num_rows, lint(jsonl(*rows)).problems) == (5, [])


PREFERENCE = "is a key of preference tuning in a form that is not read"
UNKNOWN = "is not a known key, and may change what is learned"


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"label": False}, PREFERENCE),
        ({"label": True}, PREFERENCE),
        ({"kto_tag": False}, PREFERENCE),
        ({"rejected": [USER, ASSISTANT]}, PREFERENCE),
        ({"margin": 0.5}, PREFERENCE),
        ({"label": "positive"}, UNKNOWN),
        ({"learn": False}, UNKNOWN),
        ({"chat_template_kwargs": {"enable_thinking": False}}, UNKNOWN),
        ({"prompt": "other words"}, UNKNOWN),
        ({"completion": "a"}, UNKNOWN),
        ({"images": ["cat.png"]}, "is not text, and the models read only text"),
        ({"videos": ["cat.mp4"]}, "is not text, and the models read only text"),
        ({"weight": 0.5}, "must be 1, because rows have no weights here"),
        ({"weight": 0}, "must be 1, because rows have no weights here"),
        ({"weight": True}, "must be 1, because rows have no weights here"),
    ],
)
def test_a_key_beside_the_messages_is_obeyed_or_refused_by_name(
    beside: dict[str, Any], expected: str
) -> None:
    rows = [GOOD | beside]
    if not {"prompt", "completion"} & beside.keys():
        rows.append({"prompt": "u", "completion": "a"} | beside)
    found = [str(problem) for problem in lint(jsonl(*rows)).problems]
    assert len(found) == len(rows), found
    for number, problem in enumerate(found, start=1):
        place, _, told = problem.partition(": ")
        assert place == f"line {number}"
        name = told.partition(" ")[0]
        assert name in beside and told.startswith(f"{name} {expected}")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"reasoning_content": 1}, "reasoning_content must be a string"),
        ({"thinking": "hm"}, "thinking would not be learned"),
        ({"train_detail": [{"begin_offset": 0}]}, f"train_detail {UNKNOWN}"),
        ({"prefix": True}, f"prefix {UNKNOWN}"),
        ({"channel": "analysis"}, f"channel {UNKNOWN}"),
        ({"masked": True}, f"masked {UNKNOWN}"),
        ({"audio": {"id": "x"}}, "audio is not text"),
        ({"tool_call_id": "c"}, f"tool_call_id {UNKNOWN}"),
        ({"name": 3}, "name must be a string"),
        ({"refusal": "no"}, "refusal is given, and a content too: remove one of them"),
        ({"loss": 0}, "loss must be true or false"),
        ({"train": "false"}, "train must be true or false"),
        ({"loss_weight": 0.5}, "loss_weight must be 0 or 1"),
        ({"loss_weight": "0"}, "loss_weight must be 0 or 1"),
        ({"weight": True}, "weight must be 0 or 1"),
        ({"a" * 99: 1}, "'" + "a" * 60 + f"' {UNKNOWN}"),
        ({"\n\ud83e": 1}, r"'\n\ud83e' " + UNKNOWN),
        ({"content": [{"type": "text", "text": "a", "weight": 0}]}, f"content[0].weight {UNKNOWN}"),
        ({"content": [{"type": "thinking", "thinking": "a"}]}, "content[0] would not be learned"),
        ({"tool_calls": [CALL | {"custom": {}, "x": 1}]}, f"tool_calls[0].x {UNKNOWN}"),
    ],
)
def test_a_key_of_a_message_is_obeyed_or_refused_by_name(
    message: dict[str, Any], expected: str
) -> None:
    row = {"messages": [USER, ASSISTANT | message], "tools": [TOOL]}
    (problem,) = lint(jsonl(row)).problems
    assert str(problem).startswith(f"line 1: messages[1].{expected}")


def test_a_key_of_a_tool_is_obeyed_or_refused_by_name() -> None:
    for beside, named in (({"strict": 1}, "strict"), ({"returns": {"type": "string"}}, "returns")):
        tool = {"type": "function", "function": {"name": "f"} | beside}
        (problem,) = lint(jsonl({"messages": [USER, ASSISTANT], "tools": [tool]})).problems
        assert problem.field == f"tools[0].function.{named}"


@pytest.mark.parametrize("switch", ["weight", "loss_weight", "loss", "train", "training"])
def test_other_trainers_switches_mean_weight(switch: str) -> None:
    off, on = (0.0, 1) if "weight" in switch else (False, True)
    wrong = {"role": "assistant", "content": "wrong", switch: off}
    assert learned({"messages": [USER, wrong, USER, ASSISTANT | {switch: on}]}) == ["a"]
    row = {"messages": [USER | {switch: on}, ASSISTANT]}
    assert str(*lint(jsonl(row)).problems).startswith(f"line 1: messages[0].{switch} is allowed")
    assert learned({"messages": [USER | {switch: off}, ASSISTANT]}) == ["a"]
    (problem,) = lint(jsonl({"messages": [USER, ASSISTANT | {switch: off}]})).problems
    assert "whose weight is not 0" in problem.message


def test_switches_that_contradict_each_other_are_refused() -> None:
    row = {"messages": [USER, ASSISTANT | {"weight": 1, "loss": False}]}
    (problem,) = lint(jsonl(row)).problems
    assert problem.message.endswith("whether the message is learned: weight, loss")
    assert learned({"messages": [USER, ASSISTANT | {"weight": 1, "loss": True}]}) == ["a"]


def test_neutral_keys_and_those_that_say_nothing_change_nothing() -> None:
    neutral: dict[str, Any] = {name: {"any": ["thing"]} for name in NEUTRAL}
    nothing = dict.fromkeys(("images", "rejected_response", "label", "tools", "learn"))
    filled = {"tool_calls": [], "function_call": None, "audio": None, "annotations": []}
    messages = [each | neutral for each in (SYSTEM, USER, ASSISTANT | filled | {"name": "bob"})]
    row = {"messages": messages, "prompt": "u", "channel": "chat", "weight": 1.0}
    assert read_row(row | neutral | nothing) == read_row(GOOD)


def test_the_documentation_names_the_file_of_the_neutral_keys() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "training.md").read_text()
    (named,) = re.findall(r"`(contract/row_formats/\w+\.py)`", text)
    assert all(f'"{key}"' in (root / named).read_text() for key in NEUTRAL)


def test_a_system_beside_the_messages_is_the_first_of_them() -> None:
    for system in ("s", [{"type": "text", "text": "s"}]):
        assert read_row({"messages": [USER, ASSISTANT], "system": system}) == dataclasses.replace(
            read_row(GOOD), num_added=1
        )
    assert read_row({"messages": [USER, ASSISTANT], "system": ""}).learned == (1,)
    (problem,) = lint(jsonl(GOOD | {"system": "s"})).problems
    assert str(problem).startswith("line 1: system is given, and a message of the system too")


def test_the_system_may_be_followed_by_the_assistant() -> None:
    assert learned({"messages": [SYSTEM, ASSISTANT]}) == ["a"]


def calling(arguments: Any, **message: Any) -> dict[str, Any]:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    called = {"role": "assistant", "tool_calls": [call]} | message
    return {"messages": [USER, called, USER, ASSISTANT], "tools": [TOOL]}


@pytest.mark.parametrize(
    "arguments",
    [
        *("{'a': 1}", '{"a": ', "", " ", "[1]", "null", "1", "a", '"a"', "```json\n{}\n```"),
        *('{"a": NaN}', '{"a": 1, "a": 2}', "{} {}", json.dumps(json.dumps(json.dumps({})))),
        *('{"a": "\\ud83e"}', '{"a": ' + "[" * 70 + "]" * 70 + "}", '{"a": 1e999}'),
    ],
)
def test_arguments_that_serving_cannot_write_are_refused(arguments: str) -> None:
    (problem,) = lint(jsonl(GOOD, calling(arguments))).problems
    assert (problem.line, problem.field) == (2, "messages[1].tool_calls[0].function.arguments")
    # What is not learned is rendered as serving renders what a client sends.
    assert not lint(jsonl(calling(arguments, weight=0))).problems


def test_arguments_that_were_encoded_twice_are_unwrapped_and_noted() -> None:
    row = calling(json.dumps('{"a": "é"}'))
    read = read_row(row)
    assert read.messages == read_row(calling('{"a": "é"}')).messages
    assert read.unwrapped == ("messages[1].tool_calls[0].function.arguments",)


def test_a_function_that_is_called_must_be_among_the_tools() -> None:
    for tools in ([], [{"type": "function", "function": {"name": "g"}}]):
        (problem,) = lint(jsonl(calling("{}") | {"tools": tools})).problems
        assert str(problem) == (
            "line 1: messages[1].tool_calls[0].function.name must be the name of one of the "
            "row's tools"
        )
        assert not lint(jsonl(calling("{}", weight=0) | {"tools": tools})).problems


def test_a_tools_message_names_the_function_that_was_called() -> None:
    for name, is_good in (("f", True), (None, True), ("g", False)):
        row = calling("{}")
        answered = {"role": "tool", "tool_call_id": "c", "content": "1", "name": name}
        row["messages"].insert(2, answered)
        assert (not lint(jsonl(row)).problems) == is_good


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"messages": [], "messages": [{}]}', "has the key messages twice in one object"),
        (b'{"prompt": "u", "completion": "a", "id": NaN}', "has NaN, which is not JSON"),
        (b'{"prompt": "u", "completion": "a", "id": 1e999}', "has the number 1e999, which is out"),
        (b'{"prompt": "u", "completion": "a", "id": -Infinity}', "has -Infinity, which is not JSO"),
    ],
)
def test_what_json_does_not_have_is_refused(line: bytes, expected: str) -> None:
    (problem,) = lint(jsonl(GOOD) + line).problems
    assert str(problem).startswith(f"line 2 {expected}")


def test_many_keys_that_are_there_twice_are_found_soon() -> None:
    names = b",".join(b'"%d":1' % number for number in range(80_000))
    begun = time.process_time()
    (problem,) = lint(b"{" + names + b',"79999":2}').problems
    assert "has the key 79999 twice" in str(problem)
    assert time.process_time() - begun < 1


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    rows = [
        {"messages": [USER, ASSISTANT | {"content": text}]} for text in ("\ud83e\udd9c", "\ud83e")
    ]
    (problem,) = lint(jsonl(*rows)).problems
    assert str(problem).startswith("line 2 has half of a surrogate pair")


@pytest.mark.parametrize("depth", [62, 63, 64, 800])
def test_tools_are_not_nested_deeper_than_templates_write(depth: int) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": "deep"}}}
    row = jsonl({"messages": [USER, ASSISTANT], "tools": [tool]})
    found = lint(row.replace(b'"deep"', b"[" * depth + b"]" * depth)).problems
    told = "line 1: tools[0].function.parameters is nested deeper than 64 levels"
    assert [str(problem) for problem in found] == ([] if depth <= 63 else [told])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "line 2 is not JSON"),
        (b"\xff", "line 2 is not JSON"),
        (b"[" * 100_000, "line 2 is nested too deeply"),
        (b"1" * 10_000, "line 2 is not JSON"),
        (b'"' + b"a" * MAX_LINE_BYTES + b'"', "line 2 is longer than"),
    ],
    ids=["cut", "no-utf8", "deep", "huge-number", "long"],
)
def test_bytes_that_are_no_row_are_named_by_their_line(line: bytes, expected: str) -> None:
    (problem,) = lint(jsonl(GOOD) + line).problems
    assert str(problem).startswith(expected)


def test_a_file_of_another_kind_is_told_what_is_wanted() -> None:
    complaint = lint(b"question,answer\nhi,there\n").complaint
    assert complaint.startswith("line 1 is not JSON; line 2 is not JSON. The file must be JSONL")
    assert complaint.count('{"messages":') == 1
    assert "char 0" not in complaint
    assert "Expecting" not in complaint
    assert "codec" not in lint(b"\xff\xfe\n").complaint


def test_it_gives_up_after_many_problems() -> None:
    assert len(lint(b"x\n" * 1000).problems) == MAX_PROBLEMS


@pytest.mark.parametrize("content", [b"", b"\n\n", b" \r\n"])
def test_an_empty_file_has_a_problem_of_its_own(content: bytes) -> None:
    assert [str(problem) for problem in lint(content).problems] == ["the file has no rows"]


def test_the_trainer_takes_what_passes_and_no_more(tmp_path: Path) -> None:
    worker = pytest.importorskip("worker.training.chat_data")
    path = tmp_path / "rows.jsonl"
    rows = [
        GOOD,
        {"messages": [USER, ASSISTANT, USER]},
        {"messages": [USER]},
        {"messages": [ASSISTANT, USER]},
        {"messages": [USER, {"role": "tool", "content": "a"}]},
        {"messages": [USER, {"role": "assistant", "content": None}]},
        {"messages": [USER, ASSISTANT | {"weight": 0}]},
        {"prompt": "u", "completion": "a"},
        {"messages": []},
        [],
    ]
    for row in rows:
        path.write_bytes(jsonl(row))
        try:
            list(worker.read_rows(path))
            is_taken = True
        except worker.DatasetError:
            is_taken = False
        assert is_taken == (not lint(path.read_bytes()).problems), row
