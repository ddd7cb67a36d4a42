"""Grammar: what a request's answer must obey, as text that llguidance compiles. No torch here.

A grammar is a JSON schema, a regular expression for the whole answer, or a context-free grammar in
llguidance's Lark dialect. `tool_calls` writes the last kind.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contract.schemas.ecma_regex import BadPattern
from contract.schemas.formats import PATTERNS
from contract.schemas.patterns import texts_of
from engine.argument_grammar import KEY_RULE, BareRules, common_rules
from engine.errors import BadGrammar
from engine.text.call_formats import CallFormat
from engine.text.thoughts import Names

#: Allow at most one space between two parts of the JSON: with free whitespace a small model may
#: write newlines until its tokens are used up. This replaces the schema's own "x-guidance".
_GUIDANCE = {"whitespace_pattern": " "}
#: Largest cost of one mask in the lexer, a quarter of llguidance's own limit: a few milliseconds,
#: in which all requests of the batch wait. A grammar that needs more fails its request.
STEP_LEXER_FUEL = 50_000
#: Largest number of tool calls in one answer.
MAX_CALLS = 16


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """One grammar as the request gave it; equal ones are compiled once."""

    kind: GrammarKind
    text: str

    @property
    def param(self) -> str:
        """The request's field that has the grammar."""
        return self.kind.value

    def source(self) -> str:
        """Return the text for Outlines; raise BadGrammar if a schema is not a JSON object."""
        if self.kind is not GrammarKind.JSON_SCHEMA:
            return self.text
        return json.dumps(_decoders(self.text) | {"x-guidance": _GUIDANCE})


def parse_schema(schema: str) -> dict[str, Any]:
    """Parse a schema; raise BadGrammar if it is not a JSON object."""
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise BadGrammar(f"the schema is not JSON: {error}", param="json_schema") from error
    if not isinstance(parsed, dict):
        raise BadGrammar("the schema is not a JSON object", param="json_schema")
    return parsed


def _decoders(schema: str) -> dict[str, Any]:
    """Parse a schema for the decoder. Raises BadGrammar."""
    parsed = parse_schema(schema)
    try:
        return {**_rewritten(parsed)}
    except RecursionError as error:
        raise BadGrammar("the schema is nested too deeply", param="json_schema") from error


def _rewritten(schema: Any) -> Any:
    """Rewrite the parts that the decoder understands differently, without changing their meaning.

    Its dates have a 29th of February in every year, and it writes a comma behind the last name that
    a pattern allows. The control plane's schemas have neither left.
    """
    if isinstance(schema, list):
        return [_rewritten(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for keyword, value in schema.items():
        if keyword in _OF_NAMES and isinstance(value, dict):
            found[keyword] = {name: _rewritten(part) for name, part in value.items()}
        elif keyword in _OF_SCHEMAS:
            found[keyword] = _rewritten(value)
    if schema.get("format") in _CALENDAR:
        pattern = {"pattern": f"^(?:{PATTERNS[found.pop('format')]})$"}
        found["allOf"] = [*found.get("allOf", ()), pattern]
    if isinstance(found.get("patternProperties"), dict):
        _list_used_up(found)
    return found


def _list_used_up(schema: dict[str, Any]) -> None:
    """List the names of patterns that have no others than listed names."""
    listed, patterns = dict(schema.get("properties", {})), dict(schema["patternProperties"])
    names = listed.keys() | set(schema.get("required", ()))
    for pattern, part in schema["patternProperties"].items():
        try:
            texts = texts_of(pattern, len(names))
        except BadPattern:  # the decoder may be able to read it
            continue
        if texts is not None and names >= set(texts):
            del patterns[pattern]
            listed |= {text: {"allOf": [listed.get(text, True), part]} for text in texts}
    schema |= {"properties": listed, "patternProperties": patterns}


_CALENDAR = ("date", "time", "date-time")
_OF_NAMES = frozenset(("$defs", "definitions", "patternProperties", "properties"))
_OF_SCHEMAS = frozenset(("additionalProperties", "allOf", "anyOf", "items", "oneOf", "prefixItems"))


def parser_limits(llguidance: Any) -> Any:
    """Return the most that one grammar may cost in a step, in llguidance's units."""
    return llguidance.LLParserLimits(step_lexer_fuel=STEP_LEXER_FUEL, verbose_errors=False)


def tool_calls(
    tools: Sequence[tuple[str, str]],
    *,
    begin: str,
    end: str,
    is_required: bool = False,
    is_parallel: bool = True,
    tokens: Collection[str] = (),
    free_text: str = "",
    answer_schema: str | None = None,
) -> str:
    """Return the Lark grammar of an answer that calls tools, or is other text.

    tools          (name, JSON text of the parameters' schema) of each tool that may be called; a
                   call is the JSON object {"name": …, "arguments": …} between `begin` and `end`
    is_required    there must be a call; else the answer may be other text
    is_parallel    there may be several calls
    tokens         names that the vocabulary has as added tokens, which text alone does not match
    free_text      the regular expression of other text, which must not begin like a call
    answer_schema  JSON text of a schema that other text must obey, instead of `free_text`
    """
    names = [f"call_{i}" for i in range(len(tools))]
    calls = f"call{{1,{MAX_CALLS}}}" if is_parallel else "call"
    lines = [
        f"start: {calls}" if is_required else f"start: {calls} | other",
        f"call: {_mark(begin, tokens)} ({' | '.join(names)}) {_mark(end, tokens)}",
    ]
    for rule, (name, parameters) in zip(names, tools, strict=True):
        lines.append(f"{rule}: %json {json.dumps(_call_schema(name, parameters))}")
    if not is_required:
        if answer_schema is not None:
            other = f"%json {Grammar(GrammarKind.JSON_SCHEMA, answer_schema).source()}"
        else:
            other = f"/{free_text.replace('/', chr(92) + '/')}/"
        lines.append(f"other: {other}")
    return "\n".join(lines) + "\n"


def native_calls(
    tools: Sequence[tuple[str, str]],
    form: CallFormat,
    tokens: Mapping[str, int],
    *,
    is_required: bool,
    is_parallel: bool,
    free_text: str,
    answer_schema: str | None,
) -> str:
    """Return the Lark grammar of an answer that calls tools in a model's own form.

    The other parameters are those of `tool_calls`.

    tokens  the vocabulary's added tokens by name, which text alone does not match
    """
    names = [f"call_{i}" for i in range(len(tools))]
    more = f"(joint call){{0,{MAX_CALLS - 1}}}" if is_parallel and form.joint is not None else ""
    answer = f"begin call {more} end"
    lines = [
        f"start: {answer}" if is_required else f"start: {answer} | other",
        f"call: {' | '.join(names)}",
        f"begin: {_with_tokens(form.begin, tokens)}",
        f"joint: {_with_tokens(form.joint or '', tokens)}",
        f"end: {_with_tokens(form.end, tokens)}",
    ]
    for rule, (name, parameters) in zip(names, tools, strict=True):
        start, tail = (_with_tokens(each, tokens) for each in (form.start(name), form.tail))
        if answer_schema is not None and start.startswith('"{'):
            start = f'"{{" "{start[2:]}'  # a brace apart, as in JSON: else no object begins so
        lines.append(f"{rule}: {start} {rule}_arguments {tail}")
        if form.quote:
            bare = BareRules(rule, _with_tokens(form.quote, tokens))
            whole = bare.value(_decoders(parameters))
            lines += [f"{rule}_arguments: {whole}", *bare.rules]
        elif form.pair is not None:
            bare = BareRules(rule, "")
            whole = bare.tagged(_decoders(parameters), form.pair)
            lines += [f"{rule}_arguments: {whole}", *bare.rules]
        else:
            lines.append(f"{rule}_arguments: {_json(parameters)}")
    if form.pair is not None:
        lines.append(KEY_RULE)
    if form.quote:
        lines += common_rules(_with_tokens(form.quote, tokens))
    if not is_required:
        schema = answer_schema and Grammar(GrammarKind.JSON_SCHEMA, answer_schema).source()
        free = f"/{free_text.replace('/', chr(92) + '/')}/"
        lines.append(f"other: %json {schema}" if schema else f"other: {free}")
    return "\n".join(lines) + "\n"


def _with_tokens(text: str, tokens: Mapping[str, int]) -> str:
    """Return text in which the names of tokens mean these."""
    known = sorted((name for name in tokens if name in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
    return (
        " ".join(
            f"<[{tokens[part]}]>" if part in tokens else _quoted(part) for part in parts if part
        )
        or '""'
    )


def _json(parameters: str) -> str:
    return f"%json {json.dumps(_decoders(parameters) | {'x-guidance': _GUIDANCE})}"


def harmony(
    tools: Sequence[tuple[str, str]], *, is_required: bool, answer_schema: str | None
) -> str:
    """Return the Lark grammar of an answer of gpt-oss, whose prompt ends with a message's role.

    The parameters are those of `tool_calls`. Any number of thoughts and of words before a call may
    stand before the answer, which is a call or a message in the channel `final`.
    """
    names = [f"call_{i}" for i in range(len(tools))]
    answers = names if is_required else [*names, "final"]
    lines = [
        f"start: before* ({' | '.join(answers)})",
        'before: <|channel|> ("analysis" | "commentary") <|message|> TEXT <|end|> '
        '<|start|> "assistant"',
        "TEXT: /(?s:.*)/",
    ]
    for rule, (name, parameters) in zip(names, tools, strict=True):
        to = f" to=functions.{name}"
        lines += [
            f'{rule}: ({_quoted(to)} <|channel|> "commentary" | <|channel|> '
            f'{_quoted(f"commentary{to}")}) (" "? <|constrain|>? "json")? <|message|> {rule}_json',
            f"{rule}_json: {_json(parameters)}",
        ]
    if not is_required:
        lines.append('final: <|channel|> "final" <|message|> said')
        schema = answer_schema and Grammar(GrammarKind.JSON_SCHEMA, answer_schema).source()
        lines.append(f"said: %json {schema}" if schema else "said: TEXT")
    return "\n".join(lines) + "\n"


def behind_thought(answer: Grammar, marks: Names, is_open: bool) -> Grammar:
    """Return the grammar of an answer that may follow a thought.

    answer   a schema, or Lark whose first rule is `start` and whose free text, if it has any, does
             not begin with the first of `marks`, which are tokens of the vocabulary
    is_open  the prompt ends inside of a thought, which the answer must end
    """
    is_schema = answer.kind is GrammarKind.JSON_SCHEMA
    lark = f"start: %json {answer.source()}\n" if is_schema else answer.text
    begin = f"{marks.begin} {_quoted(marks.line)}" if marks.line else marks.begin
    lines = [
        f"start: thought{'' if is_open else '?'} answer",
        lark.replace("start:", "answer:", 1).rstrip(),
        f"thought: {'' if is_open else begin} /(?s:.*)/ {marks.end} /[ \\n]*/",
    ]
    return Grammar(GrammarKind.LARK, "\n".join(lines) + "\n")


def _call_schema(name: str, parameters: str) -> dict[str, Any]:
    """Return the schema of one tool's call.

    The parameters' definitions move to the root, where references to them point.
    """
    schema = _decoders(parameters)
    definitions = schema.pop("$defs", None)
    call: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": schema},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": _GUIDANCE,
    }
    return call | ({"$defs": definitions} if definitions else {})


def _mark(text: str, tokens: Collection[str]) -> str:
    """Return a mark with the blanks beside it, as the token that the model knows if it is one."""
    name = text.strip()
    if name not in tokens:
        return _quoted(text)
    before, after = text.split(name)
    return " ".join(
        [*([_quoted(before)] if before else ()), name, *([_quoted(after)] if after else ())]
    )


def _quoted(text: str) -> str:
    return json.dumps(text)
