"""Arguments of calls are checked in bounded time, and told by their place alone."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from contract.training.row_messages import read_row
from worker.call_arguments import NOT_CHECKED, SchemaCheck, learned_calls

#: Each level asks for the next one twice.
DOUBLING = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)} | {
    "d60": {}
}
STARRED = {"properties": {"a": {"pattern": "^(a+)+$"}}}


def faults(schema: dict[str, Any], arguments: dict[str, Any], check: SchemaCheck) -> list[Any]:
    function = {"name": "f", "arguments": json.dumps(arguments)}
    call = {"id": "c", "type": "function", "function": function}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    row = read_row({"messages": messages, "tools": [tool]})
    return [check.fault(row, each) for _, each in learned_calls(row)]


@pytest.mark.parametrize(
    ("schema", "arguments", "expected"),
    [
        ({}, {"a": 1}, None),
        ({"required": ["b"]}, {"a": 1}, "at /"),
        (
            {"properties": {"a": {"properties": {"b": {"type": "string"}}}}},
            {"a": {"b": 1}},
            "at /a/b",
        ),
        ({"additionalProperties": False}, {"secret": 1}, "at /"),
        (STARRED, {"a": "aaa"}, None),
        (STARRED, {"a": "secret"}, "at /a"),
        (STARRED, {"a": "a" * 60 + "!"}, "at /a"),  # in linear time
        # No schema, or one that no regular expression engine knows.
        ({"properties": [1]}, {"a": 1}, NOT_CHECKED),
        ({"properties": {"a": {"type": "colour"}}}, {"a": 1}, NOT_CHECKED),
        ({"$ref": "http://example.com/schema"}, {"a": 1}, NOT_CHECKED),
        ({"properties": {"a": {"pattern": "(?!x"}}}, {"a": "x"}, None),
    ],
)
def test_the_place_of_a_fault_is_told(
    schema: dict[str, Any], arguments: dict[str, Any], expected: str | None
) -> None:
    assert faults(schema, arguments, SchemaCheck()) == [expected]


def test_a_check_that_takes_too_long_is_ended() -> None:
    check, begun = SchemaCheck(check_cpu_s=0.05, all_cpu_s=0.08), time.process_time()
    schema = {"$defs": DOUBLING, "$ref": "#/$defs/d0"}
    assert [faults(schema, {}, check)[0] for _ in range(3)] == [NOT_CHECKED] * 3
    assert time.process_time() - begun < 1
    # All of them together have a limit, too.
    assert faults({}, {}, check) == [NOT_CHECKED]
