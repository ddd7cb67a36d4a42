"""What the decoder lets through and a finished answer is told of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonschema")  # GPU machines have none
pytest.importorskip("re2")

from engine import BadGrammar, DashConfig, DashEngine, FinishReason
from engine.dash.answer_check import schema_error

NAMED = {
    "properties": {"name": {"type": "string"}},
    "patternProperties": {"^x-": {"type": "integer"}},
}
ONES = {"patternProperties": {"^a$": {"const": 1}}, "additionalProperties": False}


@pytest.fixture(scope="module")
def dash(tiny_model: Path) -> Any:
    with DashEngine(tiny_model, DashConfig(adapter_vram_pool="2MB", kv_pool="2MB")) as engine:
        yield engine


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        ({"enum": ["2023-02-29", "2024-02-29"], "format": "date"}, '"2024-02-29"', None),
        ({"format": "time", "pattern": "^23:59:[56]9Z$", "type": "string"}, '"23:59:59Z"', None),
        ({"type": "object", "minProperties": 2, "maxProperties": 2, **ONES}, None, "properties"),
        ({"type": "object", "minProperties": 1, "maxProperties": 1, **ONES}, None, None),
    ],
    ids=["leap day", "time", "a name twice", "a name once"],
)
def test_an_answer_says_whether_it_obeys(
    dash: DashEngine, schema: dict[str, Any], text: str | None, problem: str | None
) -> None:
    (ended,) = dash.generate(
        "hello", json_schema=json.dumps(schema), max_new_tokens=80, n=2, sampling=None
    )
    for completion in (ended, *ended.alternatives):
        assert completion.finish_reason == FinishReason.STOP, completion
        assert text is None or completion.text == text
        assert (completion.schema_error is None) == (problem is None), completion
        assert (problem or "") in (completion.schema_error or "")
        assert ("schema_error" in repr(completion)) == (problem is not None)


def test_a_day_that_no_calendar_has_is_never_written(dash: DashEngine) -> None:
    schema = {"type": "string", "format": "date", "pattern": "^2023-02-(?:29|30|31)$"}
    nested = {"anyOf": [{"items": {"$ref": "#/$defs/d"}, "minItems": 1}], "$defs": {"d": schema}}
    for each in (schema, {"type": "array", **nested}):
        (ended,) = dash.generate("hello", json_schema=json.dumps(each), max_new_tokens=20)
        assert isinstance(ended.error, BadGrammar)


def test_what_was_cut_short_obeys_nothing(dash: DashEngine) -> None:
    schema = json.dumps({"const": "a text of some length, longer than three tokens"})
    (ended,) = dash.generate("hello", json_schema=schema, max_new_tokens=3)
    assert ended.finish_reason == FinishReason.LENGTH
    assert "not JSON" in (ended.schema_error or "")
    *_, last = dash.stream("hello", json_schema=schema, max_new_tokens=3)
    assert last.completion.schema_error == ended.schema_error
    (failed,) = dash.generate("hello", json_schema="{", max_new_tokens=3)
    assert failed.error is not None and failed.schema_error is not None
    (free,) = dash.generate("hello", max_new_tokens=3)
    assert free.schema_error is None


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        (
            {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
            '{"a": 1, "\\u0061": null}',
            "at /a",
        ),
        ({"additionalProperties": {"type": "null"}}, '{"b": null, "\\u0062": null}', None),
        ({"pattern": "^(?!x)"}, '"x"', None),  # RE2 cannot tell
        ({"pattern": "^a+$"}, '"ab"', "no match"),
        ({**NAMED, "additionalProperties": False}, '{"name": "Ada"}', None),
        ({**NAMED, "additionalProperties": False}, '{"name": "Ada", "x-n": "1"}', "at /x-n"),
        ({**NAMED, "additionalProperties": False}, '{"name": "Ada", "y": 1}', "no property 'y'"),
        ({"patternProperties": {"^(?!x)": {"type": "integer"}}}, '{"x": "1"}', None),
        ({"propertyNames": {"pattern": "^[a-c]+$"}}, '{"abc": 1}', None),
        ({"propertyNames": {"pattern": "^[a-c]+$"}}, '{"abd": 1}', "no match"),
        ({**NAMED, "unevaluatedProperties": False}, '{"name": "Ada", "x-n": 1}', None),
        ({**NAMED, "unevaluatedProperties": False}, '{"name": "Ada", "y": 1}', "y"),
        ({"multipleOf": 0.1}, "0.3", None),
        ({"$ref": "http://127.0.0.1:9/schema"}, "1", "cannot be checked"),
    ],
)
def test_what_is_found(schema: dict[str, Any], text: str, problem: str | None) -> None:
    found = schema_error(json.dumps(schema), text)
    assert found is None if problem is None else problem in (found or "")


def test_what_is_nested_too_deeply_is_told_so() -> None:
    schema = json.dumps({"additionalProperties": {"$ref": "#"}})
    assert schema_error(schema, '{"a":' * 50 + "1" + "}" * 50) is None
    assert "too deeply" in (schema_error(schema, '{"a":' * 900 + "1" + "}" * 900) or "")
