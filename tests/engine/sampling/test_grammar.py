"""Constrained text parses and validates, or says that it was cut short."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import pytest

from contract.schemas.patterns import not_beginning_with
from engine import BadGrammar, Engine, FinishReason, GrammarFailed, RequestError
from engine.grammar_text import tool_calls
from engine.sampling import grammar
from engine.sampling.grammar import Matcher
from tests.engine.conftest import EOS, MakeEngine, Result, prompt, request, run

jsonschema = pytest.importorskip("jsonschema")  # GPU machines have neither
pytest.importorskip("outlines")

INVOICE = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 1, "maximum": 99},
        "currency": {"enum": ["EUR", "USD", "ARS"]},
        "paid": {"type": "boolean"},
    },
    "required": ["number", "currency", "paid"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 3}, "n": {"type": "null"}},
                "required": ["name", "n"],
                "additionalProperties": False,
            },
        },
        "kind": {"const": "nested"},
    },
    "required": ["items", "kind"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "invoice": INVOICE,
    "nested": NESTED,
    "empty": {"type": "object", "properties": {}, "additionalProperties": False},
    "array": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3},
    "ref": {
        "$defs": {"yes": {"type": "boolean"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/yes"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
_CHARACTERS: dict[int, str] = {}


def text_of(result: Result) -> str:
    """What the byte-level tokenizer of the tiny model makes of the tokens."""
    if not _CHARACTERS:
        from tokenizers import pre_tokenizers

        _CHARACTERS.update(enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())))
    from tokenizers import decoders

    pieces = [_CHARACTERS[token_id] for token_id in result.token_ids]
    return decoders.ByteLevel().decode(pieces)


def test_every_schema_is_obeyed_with_and_without_adapters(make_engine: MakeEngine) -> None:
    """Sampled at a high temperature from random models: only the grammar makes it JSON."""
    cases = {
        f"{name}/{adapter}/{seed}": (schema, adapter, seed)
        for name, schema in SCHEMAS.items()
        for adapter in (None, "all-4", "patterns")
        for seed in range(3)
    }
    results = run(
        make_engine(),
        *(
            request(
                request_id,
                prompt(seed, 6),
                adapter=adapter,
                json_schema=json.dumps(schema),
                temperature=1.5,
                seed=seed,
                max_tokens=400,
                ignore_eos=False,
            )
            for request_id, (schema, adapter, seed) in cases.items()
        ),
        request("free", prompt(1, 5), max_tokens=30),
    )
    finished = 0
    for request_id, (schema, _, _) in cases.items():
        if results[request_id].finish_reason == FinishReason.STOP:
            finished += 1
            jsonschema.validate(json.loads(text_of(results[request_id])), schema)
    assert finished > len(cases) // 2
    assert len(results["free"].token_ids) == 30


def test_whitespace_cannot_use_up_the_tokens(make_engine: MakeEngine) -> None:
    """A model that wants nothing but spaces still finishes."""
    schema = SCHEMAS["ref"] | {"x-guidance": {"whitespace_flexible": True}}
    got = run(
        make_engine(),
        request("r", prompt(0, 4), json_schema=json.dumps(schema), max_tokens=100,
                logit_bias={_space(): 100.0}, ignore_eos=False),
    )["r"]  # fmt: skip
    assert got.finish_reason == FinishReason.STOP
    assert "  " not in text_of(got)
    jsonschema.validate(json.loads(text_of(got)), SCHEMAS["ref"])


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 200}], ids=str)
def test_a_complete_grammar_ends_the_request(
    make_engine: MakeEngine, sampling: dict[str, Any]
) -> None:
    got = run(
        make_engine(),
        request("r", prompt(0, 4), json_schema=json.dumps(SCHEMAS["ref"]), max_tokens=400,
                logit_bias={_space(): -100.0}, **sampling),
    )["r"]  # fmt: skip
    assert got.finish_reason == FinishReason.STOP
    assert EOS not in text_of(got)
    jsonschema.validate(json.loads(text_of(got)), SCHEMAS["ref"])


def test_max_tokens_cuts_with_length(make_engine: MakeEngine) -> None:
    got = run(
        make_engine(),
        request("r", prompt(0, 4), json_schema=json.dumps(NESTED), max_tokens=5),
    )["r"]
    assert got.finish_reason == FinishReason.LENGTH
    assert len(got.token_ids) == 5


BAD_SCHEMAS = {
    "impossible": {"type": "integer", "minimum": 2, "maximum": 1},
    "no-such-type": {"type": "banana"},
    "unsupported-keyword": {"type": "array", "uniqueItems": True},
    "missing-ref": {"$ref": "#/$defs/nothing"},
    "bad-regex": {"type": "string", "pattern": "("},
    "endless": {"$ref": "#"},
}


def test_a_bad_schema_ends_its_own_request_only(make_engine: MakeEngine) -> None:
    results = run(
        make_engine(),
        *(
            request(name, prompt(0, 4), json_schema=json.dumps(schema), max_tokens=50)
            for name, schema in BAD_SCHEMAS.items()
        ),
        request("good", prompt(0, 4), json_schema=json.dumps(INVOICE), max_tokens=5),
        request("free", prompt(0, 4), max_tokens=5),
    )
    for name in BAD_SCHEMAS:
        assert results[name].finish_reason == FinishReason.ERROR, name
        assert isinstance(results[name].error, BadGrammar), name
        assert results[name].error.param == "json_schema"
        assert results[name].token_ids == []
    assert results["good"].error is None
    assert len(results["free"].token_ids) == 5


@pytest.mark.parametrize("text", ["{", "[]", "3", '"x"', "[" * 20_000, ""], ids=range(6))
def test_what_is_no_json_object_is_refused_at_once(make_engine: MakeEngine, text: str) -> None:
    engine = make_engine()
    with pytest.raises(BadGrammar):
        engine.add(request("r", prompt(0, 4), json_schema=text))
    assert not engine.has_work()


class Exhausted:
    """llguidance's matcher when it has spent its fuel after some tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def compute_bitmask(self) -> bytes:
        return b"\xff" * 32

    def is_error(self) -> bool:
        return self.left <= 0

    def get_error(self) -> str:
        return "OutOfFuel: behind 'secret'"

    def is_stopped(self) -> bool:
        return False

    def consume_token(self, token_id: int) -> None:
        self.left -= 1


def test_a_grammar_that_gives_out_ends_its_own_request_only(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the server's fault: it was accepted."""
    engine = make_engine()
    engine.add(request("r", prompt(0, 4), json_schema=json.dumps(INVOICE), max_tokens=50))
    (sequence,) = engine._requests.sequences("r")
    while engine._grammars.matcher(sequence) is None:
        engine.step()
    engine.add(request("free", prompt(0, 4), max_tokens=20))
    engine._grammars._matchers[sequence] = Matcher(Exhausted(3), eos_token_id=256)
    results = run(engine)
    error = results["r"].error
    assert isinstance(error, GrammarFailed) and not isinstance(error, RequestError)
    assert "OutOfFuel" not in error.message and "OutOfFuel" in caplog.text
    assert "secret" not in caplog.text
    assert len(results["r"].token_ids) == 2
    assert results["free"].finish_reason == FinishReason.LENGTH


ONE = {"const": 1}
LISTED = {"properties": {"a": ONE}, "required": ["a"]}
MATCHED = {"patternProperties": {"^a$": ONE}, "additionalProperties": False}


def run_with_seeds(engine: Engine, schema: dict[str, Any]) -> list[Any]:
    text = json.dumps({"type": "object", **schema})
    requests = [
        request(f"r{i}", prompt(0, 4), json_schema=text, temperature=2.0, seed=i) for i in range(8)
    ]
    return list(run(engine, *requests).values())


def test_a_pattern_that_listed_names_use_up_is_no_dead_end(make_engine: MakeEngine) -> None:
    """The decoder would allow a comma behind the last name that there can be (llguidance#265)."""
    for end in run_with_seeds(make_engine(), LISTED | MATCHED):
        assert end.error is None


def test_a_dead_end_in_mid_answer_is_no_fault_of_the_request(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The control plane rewrites this schema, too."""
    ends = run_with_seeds(make_engine(), {"allOf": [LISTED, MATCHED]})
    errors = [end.error for end in ends if end.error is not None]
    assert errors
    for error in errors:
        assert isinstance(error, GrammarFailed)
        assert error.code == "grammar_failed" and "NoExtension" not in error.message
    assert "NoExtensionBias" in caplog.text


@pytest.mark.parametrize(
    ("grammar", "whole"),
    [
        ({"regex": "(?:yes|no)"}, "yes|no"),
        ({"regex": r"[0-9]{3}-[A-Z]{2}"}, "[0-9]{3}-[A-Z]{2}"),
        ({"lark": 'start: "<" NAME ">"\nNAME: /[a-z]{2,5}/'}, "<[a-z]{2,5}>"),
    ],
    ids=["choice", "regex", "lark"],
)
def test_other_grammars_are_obeyed(
    make_engine: MakeEngine, grammar: dict[str, Any], whole: str
) -> None:
    got = run(
        make_engine(),
        request("r", prompt(0, 4), temperature=1.5, seed=1, max_tokens=60, **grammar),
    )["r"]
    assert got.finish_reason == FinishReason.STOP
    assert re.fullmatch(whole, text_of(got))


def test_one_grammar_at_a_time(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match="cannot be combined with"):
        engine.add(request("r", prompt(0, 4), json_schema="{}", regex="a"))
    with pytest.raises(RequestError, match="is not text"):
        engine.add(request("r", prompt(0, 4), regex=3))
    engine.add(request("r", prompt(0, 4), regex="("))
    assert isinstance(run(engine)["r"].error, BadGrammar)


def test_a_tool_is_called_or_other_text_comes(make_engine: MakeEngine) -> None:
    """With the marker forbidden or forced, at every temperature, the rest follows from it."""
    tools = [
        ("tag", json.dumps({"type": "object", "properties": {"n": {"enum": [1, 2]}},
                            "required": ["n"], "additionalProperties": False})),
        ("stop", json.dumps({"type": "object", "properties": {}, "additionalProperties": False})),
    ]  # fmt: skip
    must = tool_calls(tools, begin="<call>", end="</call>", is_required=True, is_parallel=False)
    other = not_beginning_with("<call>", after=" \n")
    may = tool_calls(tools, begin="<call>", end="</call>", free_text=other)
    engine = make_engine()
    results = run(
        engine,
        *(
            request(f"{name}{seed}", prompt(seed, 4), lark=lark, temperature=1.5, seed=seed,
                    max_tokens=150, ignore_eos=False)
            for name, lark in (("must", must), ("may", may))
            for seed in range(6)
        ),
    )  # fmt: skip
    for name, result in results.items():
        assert result.error is None, name
        text = text_of(result)
        if result.finish_reason == FinishReason.STOP and (
            name.startswith("must") or text.startswith("<call>")
        ):
            call = json.loads(text.removeprefix("<call>").removesuffix("</call>"))
            assert call in (
                {"name": "tag", "arguments": {"n": 1}},
                {"name": "tag", "arguments": {"n": 2}},
                {"name": "stop", "arguments": {}},
            )
    assert sum(r.finish_reason == FinishReason.STOP for r in results.values()) >= 6


def test_cancelled_while_compiling(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(request("r", prompt(0, 4), json_schema=json.dumps(INVOICE)))
    engine.cancel("r")
    (output,) = engine.step()
    assert output.finish_reason == FinishReason.CANCELLED
    assert not engine.has_work()


def test_prepared_once_for_whoever_asks_meanwhile(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, may_go_on = threading.Event(), threading.Event()
    made: list[object] = []

    class Slow(grammar._Backend):
        def __init__(self, tokenizer: Any) -> None:
            made.append(self)
            prepared.set()
            assert may_go_on.wait(30)
            super().__init__(tokenizer)

    monkeypatch.setattr(grammar, "_Backend", Slow)
    engine = make_engine()
    preparing = engine.prepare_grammars()
    assert prepared.wait(30)
    engine.add(request("free", prompt(1, 4), max_tokens=3))
    assert run(engine)["free"].finish_reason == FinishReason.LENGTH
    engine.add(request("r", prompt(0, 4), regex="[0-9]{2}"))
    engine.step()
    may_go_on.set()
    assert run(engine)["r"].finish_reason == FinishReason.STOP
    preparing.result()
    engine.prepare_grammars().result()
    assert len(made) == 1


def _space() -> int:
    text_of(Result())
    return next(i for i, character in _CHARACTERS.items() if character == "Ġ")


def test_no_pattern_is_kept_for_the_whole_process(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`re` keeps what it compiled: its time would tell what another tenant's schema has."""
    compiled: list[Any] = []
    compile_pattern = re.compile

    def noted(pattern: Any, *flags: Any) -> Any:
        compiled.append(pattern)
        return compile_pattern(pattern, *flags)

    monkeypatch.setattr(re, "compile", noted)
    pattern = "^[a-f]{2,5}$"
    schema = json.dumps({"type": "string", "pattern": pattern, "maxLength": 5})
    engine = make_engine()
    done = run(engine, request("r", prompt(1, 4), json_schema=schema, max_tokens=2))["r"]
    assert done.error is None and pattern not in compiled
