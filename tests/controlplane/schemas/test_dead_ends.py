"""Objects whose names are listed, matched and forbidden at once: the decoder, which is led at
random through what it allows, never gets to a place where nothing may follow, and every answer to
a schema that is enforced whole obeys it."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.schemas import BadSchema, Status, plan
from engine.dash.answer_check import make_check

CHECK = make_check()
BYTES = llguidance.LLTokenizer("byte")
INT: dict[str, Any] = {"type": "integer"}
LIKELY = frozenset(b'",:{}0123456789absx_kq\\u')

NAMES = st.sampled_from(["a", "b", "ab", "s_x"])
PATTERNS = st.sampled_from(
    ["^a$", "^(a|b)$", "^[ab]$", "^a", "b$", "^s_", "^[a-c]{1}$", "^ab?$", "^.$", "^x+$",
     "^(?:a|b|ab|s_x)$", "^[ab]{1,2}$", "^s_x$"]
)  # fmt: skip
VALUES = st.sampled_from(
    [True, False, INT, {"type": "integer", "minimum": 5, "maximum": 3}, {"enum": [1]}, {"const": 2},
     {"type": "boolean"}, {"type": "string", "pattern": "^q$"}]
)  # fmt: skip
SIZES = st.integers(0, 3)
NAMES_OF = st.one_of(
    st.fixed_dictionaries({"pattern": PATTERNS}),
    st.fixed_dictionaries({"enum": st.lists(NAMES, min_size=1, max_size=2, unique=True)}),
    st.fixed_dictionaries({"maxLength": SIZES}),
    st.fixed_dictionaries({"minLength": SIZES}),
)


def objects(inner: st.SearchStrategy[Any] | None) -> st.SearchStrategy[Any]:
    """Schemas of objects; `inner`: those of their properties and of the parts of `allOf`."""
    values = VALUES if inner is None else VALUES | inner
    optional: dict[str, st.SearchStrategy[Any]] = {
        "properties": st.dictionaries(NAMES, values, max_size=3),
        "patternProperties": st.dictionaries(PATTERNS, VALUES, max_size=2),
        "additionalProperties": st.just(False) | st.sampled_from([True, INT]),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "propertyNames": NAMES_OF,
        "minProperties": SIZES,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
        "not": st.fixed_dictionaries({"required": st.lists(NAMES, min_size=1, max_size=1)}),
    }
    if inner is not None:
        parts = st.lists(inner, min_size=2, max_size=2)
        optional |= {"allOf": parts, "anyOf": parts}
    return st.fixed_dictionaries({"type": st.just("object")}, optional=optional)


def start(decoding: str) -> Any:
    """A matcher at the beginning; None: nothing satisfies the schema, as the worker says."""
    schema = json.loads(decoding) | {"x-guidance": {"whitespace_pattern": " "}}
    grammar = llguidance.grammar_from("json_schema", json.dumps(schema))
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    if matcher.is_error():
        assert "nsatisfiable" in matcher.get_error(), matcher.get_error()
        return None
    return matcher


def answer(matcher: Any, seed: int) -> str | None:
    """A random text that the decoder allows; None: it was too long."""
    rng, written = random.Random(seed), b""
    for _ in range(120):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), (matcher.stop_reason(), written)
        allowed = [
            i * 8 + bit for i, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1
        ]
        token = rng.choice([each for each in allowed if each in LIKELY] or allowed)
        matcher.consume_token(token)
        written += bytes([token] if token < 256 else [])
        if matcher.is_stopped():
            return written.decode(errors="replace")
    return None


def check_answers(schema: dict[str, Any], num_seeds: int) -> int:
    """Check some answers; how many were finished."""
    planned = plan(schema)
    matcher = start(planned.decoding)
    if matcher is None:
        return 0
    texts = [answer(matcher.deep_copy(), seed) for seed in range(num_seeds)]
    finished = [text for text in texts if text is not None]
    if planned.is_enforced:
        for text in finished:
            assert CHECK(planned.schema, text) is None, text
    return len(finished)


@settings(max_examples=40, deadline=None)
@given(schema=objects(objects(None)))
def test_no_object_is_led_into_a_dead_end(schema: dict[str, Any]) -> None:
    try:
        check_answers(schema, 3)
    except BadSchema:
        pass


def closed(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, **keywords}


@pytest.mark.parametrize(
    "schema",
    [
        closed(properties={"score": INT}, required=["score"], patternProperties={"^score$": INT}),
        closed(properties={"a": INT, "b": INT}, patternProperties={"^[ab]$": {"minimum": 3}}),
        closed(patternProperties={"^a$": INT}, required=["a"]),
        closed(properties={"a": INT}, propertyNames={"enum": ["a"]}),
        closed(properties={"ab": INT}, propertyNames={"pattern": "^ab$"}),
        {"type": "object", "properties": {"a": INT, "b": INT}, "propertyNames": {"minLength": 2}},
        {
            "type": "object",
            "properties": {"n": {"$ref": "#/$defs/n"}},
            "required": ["n"],
            "$defs": {"n": closed(properties={"x": INT}, patternProperties={"^(x|x)$": INT})},
        },
        {"anyOf": [closed(properties={"a": INT}, patternProperties={"^a$": INT}), INT]},
        {
            "type": "object",
            "allOf": [
                {"properties": {"a": INT}, "required": ["a"]},
                {"patternProperties": {"^a$": {"minimum": 3}}, "additionalProperties": False},
            ],
        },
    ],
    ids=str,
)
def test_names_that_are_used_up_end_the_object(schema: dict[str, Any]) -> None:
    """A comma behind the last name would leave nothing to write (llguidance#265)."""
    assert plan(schema).is_enforced
    assert check_answers(schema, 12) >= 1


@pytest.mark.parametrize(
    "schema, path",
    [
        (closed(patternProperties={"^a": INT, "b$": {"maximum": 3}}), "/patternProperties"),
        (
            {"allOf": [closed(patternProperties={"^a": INT}), {"patternProperties": {"b$": INT}}]},
            "/allOf/0/patternProperties",
        ),
        (closed(patternProperties={"^(?=a)": INT}), "/patternProperties"),
        (closed(propertyNames={"pattern": "^(?=a)b"}), "/propertyNames/pattern"),
    ],
    ids=str,
)
def test_patterns_that_the_decoder_cannot_follow_are_named(
    schema: dict[str, Any], path: str
) -> None:
    found = plan(schema).with_status(Status.CHECKED, Status.UNSUPPORTED)
    assert path in [finding.path for finding in found]
    assert check_answers(schema, 3) > 0


@pytest.mark.parametrize(
    "schema, path",
    [
        ({"patternProperties": {"(?P<y>a)": INT}}, "/patternProperties"),
        ({"contains": {"pattern": r"\1"}}, "/contains/pattern"),
        ({"properties": {"a": {"pattern": "a++"}}}, "/properties/a/pattern"),
        ({"propertyNames": {"pattern": "("}}, "/propertyNames/pattern"),
    ],
)
def test_what_is_no_pattern_is_refused_where_it_stands(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(BadSchema, match="not a regular expression of ECMA-262") as caught:
        plan({"type": "object", **schema})
    assert caught.value.path == path


@pytest.mark.parametrize(
    "schema, text",
    [
        ({"properties": {"a": INT}}, r'{"a":1,"\u0061":"x"}'),
        ({"properties": {"a": INT}, "additionalProperties": {"type": "string"}}, r'{"\u0061":"x"}'),
        ({"properties": {"a\nb": INT}}, r'{"a\nb":1,"a\u000ab":"x"}'),
        (
            {"properties": {"o": {"type": "object", "properties": {"a": INT}}}},
            r'{"o":{"\u0061":2}}',
        ),
    ],
)
def test_a_name_has_no_second_spelling(schema: dict[str, Any], text: str) -> None:
    """Every client would take it for the name itself, and the last one counts."""
    matcher = start(plan({"type": "object", **schema}).decoding)
    ids = BYTES.tokenize_bytes(text.encode())
    assert matcher.try_consume_tokens(ids) < len(ids)
