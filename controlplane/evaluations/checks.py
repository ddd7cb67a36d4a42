"""Checks of an answer: each gives a score from 0 to 1. Pure.

    {"type": "exact"}                        the answer is the expected one, but for blanks around
    {"type": "contains", "value": "…"}       it has the text; without `value` the expected answer
    {"type": "regex", "pattern": "…"}        the pattern is found in it (ECMA-262, linear subset)
    {"type": "json_f1"}                      F1 of the fields (path and value) of two JSON values
    {"type": "json_schema", "schema": {…}}   it is JSON that obeys the schema; {}: it is JSON
    {"type": "similarity", "by": "tokens"}   F1 of the words; by "characters": of their trigrams
    {"type": "judge", "judge": "…", "rubric": "…"}  what another model says: see `judge`

A schema has no patterns here: an answer's JSON is checked in this process, whose regular
expressions may take exponential time. RE2 searches the patterns of `regex`, in linear time.
"""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import jsonschema
import re2
from jsonschema_specifications import REGISTRY

from contract.exact_numbers import is_integer, is_multiple, read_decimal
from contract.schemas.ecma_regex import BadPattern
from contract.schemas.patterns import read_pattern
from controlplane.errors import InvalidRequest
from controlplane.schemas import BadSchema, plan
from controlplane.tenants.models import is_slug

MAX_CHECKS = 8
MAX_TEXT_CHARS = 4000
MAX_SCHEMA_CHARS = 16_000
#: Largest number of a JSON value's fields; values with more are not compared.
_MAX_FIELDS = 2000
#: Largest memory of a compiled pattern.
_PATTERN_BYTES = 32 << 20
_WORD = re.compile(r"\w+|[^\w\s]")
_NGRAM = 3
#: Fields of each type of check, and whether they are required.
_FIELDS: dict[str, dict[str, bool]] = {
    "exact": {},
    "contains": {"value": False},
    "regex": {"pattern": True},
    "json_f1": {},
    "json_schema": {"schema": True},
    "similarity": {"by": False},
    "judge": {"judge": True, "rubric": False},
}
#: Types that compare with the case's expected answer.
NEED_EXPECTED = ("exact", "json_f1", "similarity")

Check = Mapping[str, Any]


def checked(checks: Any, param: str, *, has_expected: bool) -> list[dict[str, Any]]:
    """Return a case's checks as they are stored. Raises InvalidRequest naming the field."""
    if not isinstance(checks, list) or len(checks) > MAX_CHECKS:
        raise InvalidRequest(f"checks must be a list of at most {MAX_CHECKS}.", param=param)
    return [
        _checked(check, f"{param}.{number}", has_expected=has_expected)
        for number, check in enumerate(checks)
    ]


def _checked(check: Any, param: str, *, has_expected: bool) -> dict[str, Any]:
    kind = check.get("type") if isinstance(check, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        known = ", ".join(_FIELDS)
        raise InvalidRequest(f"A check's type must be one of {known}.", param=f"{param}.type")
    fields = _FIELDS[kind]
    for name in check:
        if name != "type" and name not in fields:
            raise InvalidRequest(
                f"A check of type {kind} has no such field: remove it.",
                param=f"{param}.{name[:60]}",
            )
    for name, is_needed in fields.items():
        if is_needed and name not in check:
            raise InvalidRequest(
                f"A check of type {kind} needs this field.", param=f"{param}.{name}"
            )
    needs_answer = kind in NEED_EXPECTED or (kind == "contains" and "value" not in check)
    if needs_answer and not has_expected:
        raise InvalidRequest(
            f"A check of type {kind} compares with `expected`: set it.", param=param
        )
    for name in fields.keys() & check.keys():
        _check_field(name, check[name], f"{param}.{name}")
    return dict(check)


def _check_field(name: str, value: Any, param: str) -> None:
    if name == "schema":
        _check_schema(value, param)
        return
    if not isinstance(value, str) or not value or len(value) > MAX_TEXT_CHARS or "\0" in value:
        raise InvalidRequest(
            f"This must be a text of 1 to {MAX_TEXT_CHARS} characters.", param=param
        )
    if name == "pattern":
        try:
            read_pattern(value)
        except BadPattern as error:
            raise InvalidRequest(f"The pattern {error}.", param=param) from error
    elif name == "by" and value not in ("tokens", "characters"):
        raise InvalidRequest("by must be tokens or characters.", param=param)
    elif name == "judge" and not is_slug(value):
        raise InvalidRequest("This must be the name of a judge.", param=param)


def _check_schema(schema: Any, param: str) -> None:
    if not isinstance(schema, dict) or len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise InvalidRequest(
            f"This must be an object of at most {MAX_SCHEMA_CHARS} characters.", param=param
        )
    try:
        plan(schema)
    except BadSchema as error:
        raise InvalidRequest(f"The schema {error}.", param=param) from error
    if any(name in ("pattern", "patternProperties") for name in _names(schema)):
        raise InvalidRequest(
            "A schema cannot have patterns here: add a check of type regex.", param=param
        )


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _names(item)
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)


def scores(checks: Iterable[Check], output: str, expected: str) -> list[float | None]:
    """Return the score of each check; None for a judge's, which is asked later."""
    return [_score(check, output, expected) for check in checks]


def _score(check: Check, output: str, expected: str) -> float | None:
    match check["type"]:
        case "exact":
            return float(output.strip() == expected.strip())
        case "contains":
            return float(check.get("value", expected.strip()) in output)
        case "regex":
            return float(is_found(check["pattern"], output))
        case "json_f1":
            return json_f1(output, expected)
        case "json_schema":
            return float(obeys(output, check["schema"]))
        case "similarity":
            return similarity(output, expected, check.get("by", "tokens"))
    return None


def is_found(pattern: str, text: str) -> bool:
    """Return whether a pattern that was checked is found; one too large for RE2 is not."""
    options = re2.Options()
    options.log_errors, options.max_mem = False, _PATTERN_BYTES
    try:
        expression = re2.compile(read_pattern(pattern).search, options)
    except re2.error:
        return False
    finally:
        re2.purge()  # it would keep the last 128 patterns
    # RE2 takes no half of a surrogate pair.
    return expression.search(text.encode("utf-8", "replace").decode()) is not None


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of a case's scores; None if there are none, or one is not known yet."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def json_f1(output: str, expected: str) -> float:
    """Return the F1 of the fields of two JSON texts; 0 if the answer is not JSON."""
    try:
        found, wanted = _fields(_parsed(output)), _fields(_parsed(expected))
    except (ValueError, RecursionError):
        return 0.0
    return _f1(found, wanted)


def obeys(output: str, schema: dict[str, Any]) -> bool:
    """Return whether an answer is JSON that obeys a checked schema."""
    base: Any = jsonschema.Draft202012Validator
    types = base.TYPE_CHECKER.redefine("integer", lambda _, value: is_integer(value))
    kind: Any = jsonschema.validators.extend(base, {"multipleOf": _multiple_of}, type_checker=types)
    try:
        exact = json.loads(json.dumps(schema), parse_float=read_decimal)
        # An empty registry: jsonschema's default would fetch a reference's URL from the network.
        return bool(kind(exact, registry=REGISTRY).is_valid(_parsed(output, read_decimal)))
    except (ValueError, RecursionError, ArithmeticError, jsonschema.exceptions.SchemaError):
        return False
    except Exception as error:
        if type(error).__module__.startswith(("referencing", "jsonschema")):
            return False  # a reference that leads nowhere
        raise


def similarity(output: str, expected: str, by: str) -> float:
    """Return the F1 of words, or of trigrams of characters; case and blanks do not count."""
    one, other = output.casefold(), expected.casefold()
    if by == "tokens":
        return _f1(_counted(_WORD.findall(one)), _counted(_WORD.findall(other)))
    return _f1(_counted(_trigrams(one)), _counted(_trigrams(other)))


def _multiple_of(validator: Any, step: Any, number: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(number, "number") and not is_multiple(number, step):
        yield jsonschema.ValidationError(f"{number} is not a multiple of {step}")


def _parsed(text: str, parse_float: Callable[[str], Any] = float) -> Any:
    """Return the JSON of an answer, also between the fences of Markdown. Raises ValueError."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text.split("\n", 1)[1][:-3]

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse, parse_float=parse_float)


def _fields(value: Any) -> collections.Counter[Hashable]:
    found: collections.Counter[Hashable] = collections.Counter()
    todo: list[tuple[tuple[str, ...], Any]] = [((), value)]
    while todo:
        path, item = todo.pop()
        if len(found) > _MAX_FIELDS:
            raise ValueError("too many fields")
        if isinstance(item, dict) and item:
            todo += [((*path, name), part) for name, part in item.items()]
        elif isinstance(item, list) and item:
            todo += [((*path, "[]"), part) for part in item]
        else:
            is_number = isinstance(item, int | float) and not isinstance(item, bool)
            found[(path, "number" if is_number else type(item).__name__, str(_plain(item)))] += 1
    return found


def _plain(item: Any) -> Any:
    """Write 3 and 3.0 alike."""
    return int(item) if isinstance(item, float) and item.is_integer() else item


def _trigrams(text: str) -> list[str]:
    text = " ".join(text.split())
    return [text[i : i + _NGRAM] for i in range(max(1, len(text) - _NGRAM + 1))] if text else []


def _counted(items: Iterable[Hashable]) -> collections.Counter[Hashable]:
    return collections.Counter(items)


def _f1(found: collections.Counter[Hashable], wanted: collections.Counter[Hashable]) -> float:
    if not found and not wanted:
        return 1.0
    common = (found & wanted).total()
    return 2 * common / (found.total() + wanted.total())
