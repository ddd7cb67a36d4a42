"""What of a finished answer is held against which schema, and when its end is told."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.messages.protocol import CALL_BEGIN, GenerateJob, TokenEvent
from contract.messages.tool_calls import BLANKS, CallReader, read_calls
from contract.schemas.patterns import not_beginning_with
from engine.dash.answer_check import make_check
from engine.text.codec import TextCodec
from tests.contract.test_tool_calls import ARGUMENTS, call
from tests.fakes import write_fake_base
from tests.messages import make_job
from tests.worker.serving.test_active import feed, make_request, news_of
from worker.grammar.checks import checks_of
from worker.serving.active_request import ActiveRequest
from worker.serving.requests import Requests

UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
LARGE = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5}}}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


FIELDS: dict[str, Any] = {
    "tools": (tool("unique", UNIQUE), tool("large", LARGE)),
    "tool_schemas": ('{"type":"object"}', '{"type":"object"}'),
    "tool_choice": "auto",
}


def found(job: GenerateJob, answer: str) -> list[str | None]:
    """What jsonschema makes of each stretch."""
    check = make_check()
    problems = [(each, check(each.schema, each.text)) for each in checks_of(job, answer)]
    return [None if problem is None else each.told(problem) for each, problem in problems]


def test_each_call_is_held_against_its_tools_own_schema() -> None:
    """Not against what the decoder got, which leaves out what it cannot enforce."""
    said = call("unique", '{"a": [1, 1]}') + call("large", '{"a": 7}') + call("large", '{"a": 3}')
    first, second, third = found(make_job(**FIELDS), said)
    assert first == "call 0 of unique: at /a: [1, 1] has non-unique elements"
    assert second is None
    assert (third or "").startswith("call 2 of large: at /a: 3 is less than the minimum")


def test_a_call_of_no_tool_and_arguments_that_are_no_json() -> None:
    unknown, broken = found(make_job(**FIELDS), call("f", "{}") + call("large", '{"a" 3}'))
    assert (unknown or "").startswith("call 0 of f: ")
    assert "not JSON" in (broken or "")


def test_text_beside_tools_is_held_against_the_answers_schema_if_there_is_one() -> None:
    assert found(make_job(**FIELDS), "hello") == []
    job = make_job(**FIELDS, json_schema='{"type":"integer"}')
    assert found(job, "5") == [None]
    assert found(job, '"x"') == ["at /: 'x' is not of type 'integer'"]
    assert found(job, "\n" + call("large", '{"a": 7}')) == [None]  # a call is no integer


def end(request: ActiveRequest, codec: TextCodec, said: str, reason: str = "stop") -> None:
    """Generate all of it, and have it looked at as a worker does."""
    feed(request, codec, said, finish_reason=reason)


async def look(request: ActiveRequest) -> None:
    check = make_check()

    class GrammarService:
        async def problem_of(self, schema: str, answer: str, tenant_id: str) -> str | None:
            assert tenant_id == request.job.tenant_id
            return check(schema, answer)

    requests = Requests.__new__(Requests)
    requests.grammars = GrammarService()  # type: ignore[assignment]  # its process, without one
    for choice in request.unchecked:
        await requests._check(choice, request.job)
    request.conclude(200.0)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec(write_fake_base(tmp_path_factory.mktemp("base")))


async def test_the_end_of_an_answer_with_calls_is_told_after_the_check(codec: TextCodec) -> None:
    request = make_request(codec, **FIELDS)
    end(request, codec, call("unique", '{"a": [1, 1]}'))
    assert request.awaits_check
    assert news_of(request).event.finish_reason is None
    await look(request)
    news = news_of(request)
    assert news.event.finish_reason == "stop"
    assert "non-unique" in (news.event.schema_error or "")
    assert news.done is not None
    assert news.done.finish_reason == "stop"


async def test_calls_that_obey_end_without_a_word(codec: TextCodec) -> None:
    request = make_request(codec, **FIELDS)
    end(request, codec, call("large", '{"a": 5}'))
    await look(request)
    event = news_of(request).event
    assert (event.finish_reason, event.schema_error) == ("stop", None)


async def test_a_strict_tools_broken_call_is_a_failure_whatever_others_do(codec: TextCodec) -> None:
    request = make_request(codec, **FIELDS, strict_tools=("large",))
    end(request, codec, call("unique", '{"a": [1, 1]}') + call("large", '{"a": 3}'))
    await look(request)
    event = news_of(request).event
    assert (event.error_code, event.error_param) == ("answer_invalid", "tools")
    assert "call 1 of large" in (event.error_message or "")


@pytest.mark.parametrize(
    ("said", "reason", "fields"),
    [
        ('<tool_call>\n{"name": "large", "arguments": {"a": 3', "length", {}),
        (call("large", '{"a": 3}')[:-9] + "STOP", "stop", {"stop": ("STOP",)}),
        ("just words", "stop", {}),
        (call("large", '{"a": 3}'), "cancelled", {}),
    ],
    ids=["cut by its length", "cut by the client's stop", "words", "cancelled"],
)
def test_what_is_no_finished_call_is_not_looked_at(
    codec: TextCodec, said: str, reason: str, fields: dict[str, Any]
) -> None:
    request = make_request(codec, **FIELDS, **fields)
    end(request, codec, said, reason)
    assert not request.awaits_check
    assert request.is_finished
    assert news_of(request).event.schema_error is None


def test_half_a_surrogate_pair_in_an_answer_can_be_told_of() -> None:
    numbers = json.dumps({"type": "object", "additionalProperties": {"type": "number"}})
    problem = make_check()(numbers, r'{"\ud800": "x"}')
    assert problem == "at /?: 'x' is not of type 'number'"
    assert TokenEvent(request_id="r", lease=1, seq=0, schema_error=problem).encode()


def test_calls_are_read_from_a_whole_answer() -> None:
    said = "\n " + call("f", ARGUMENTS) + "\n" + call("g-1", "{}")
    assert read_calls(said) == [("f", ARGUMENTS), ("g-1", "{}")]
    assert read_calls("text") == []


@given(st.lists(st.sampled_from([*BLANKS, "<tool_call>", "<tool_", "call>", "x", "é"]), max_size=5))
def test_the_decoder_lets_through_as_text_what_is_read_as_text(pieces: list[str]) -> None:
    """Else a call could be written that no grammar holds to its schema."""
    text = "".join(pieces)
    reader = CallReader()
    shown = "".join(piece.text for piece in [*reader.feed(text), *reader.finish()])
    may = re.fullmatch(not_beginning_with(CALL_BEGIN.strip(), after=BLANKS), text)
    assert (may is not None) == (shown == text)


def test_a_job_that_names_strict_tools_comes_through_the_wire() -> None:
    job = make_job(**FIELDS, strict_tools=("large",))
    assert GenerateJob.decode(job.encode()).strict_tools == ("large",)
    assert json.loads(job.encode())["strict_tools"] == ["large"]
