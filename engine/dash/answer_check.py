"""Checks with `jsonschema` whether a finished answer obeys its schema, in library and worker.

RE2 matches the patterns, in time linear in the answer's length for any pattern. Numbers are
decimals: 0.3 is a multiple of 0.1, and 1e999999999 costs no more than 1. If a name occurs twice in
an object, the last one counts, as for any JSON parser.

This module is imported when the first answer is checked: nothing else in the engine needs RE2 and
`jsonschema`, which comes with Outlines. No torch here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import re2
from jsonschema_specifications import REGISTRY

from contract.exact_numbers import is_integer, is_multiple, read_decimal
from contract.schemas import formats
from contract.schemas.ecma_regex import BadPattern
from contract.schemas.patterns import read_pattern

MAX_MESSAGE_CHARS = 300
#: Number of compiled patterns to keep. Each may have megabytes.
_NUM_PATTERNS = 16
_PATTERN_BYTES = 32 << 20

Check = Callable[[str, str], str | None]


def make_check() -> Check:
    """Make a function (schema, answer), both JSON text -> where and how the answer fails, or None.

    The function raises RecursionError if either is nested too deeply.
    """
    base = jsonschema.Draft202012Validator
    checker = jsonschema.FormatChecker(formats=tuple(base.FORMAT_CHECKER.checkers))
    for name, is_valid in formats.CHECKS.items():
        checker.checks(name)(functools.partial(_has_format, is_valid))
    kind = jsonschema.validators.extend(
        base,
        {
            "pattern": _pattern,
            "patternProperties": _pattern_properties,
            "additionalProperties": _additional_properties,
            "multipleOf": _multiple_of,
            "unevaluatedProperties": _unevaluated_properties,
            "$dynamicRef": _unchecked,
        },
        type_checker=base.TYPE_CHECKER.redefine("integer", lambda _, value: is_integer(value)),
    )

    def validator(schema: str) -> Any:
        parsed = json.loads(schema, parse_float=read_decimal)
        # A registry of its own: jsonschema's would fetch the URL of a reference from the network.
        return kind(parsed, format_checker=checker, registry=REGISTRY)

    def check(schema: str, answer: str) -> str | None:
        try:
            value = json.loads(answer, parse_float=read_decimal, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"the answer is not JSON: {error}"[:MAX_MESSAGE_CHARS]
        found = next(validator(schema).iter_errors(value), None)
        return None if found is None else _message(found)

    return check


_check = functools.cache(make_check)


def schema_error(schema: str, text: str) -> str | None:
    """Return how a text that was generated under a schema violates it; None: it does not.

    schema, text  both JSON
    """
    try:
        return _check()(schema, text)
    except RecursionError:
        return "it is nested too deeply to be checked"
    except Exception as error:  # a schema that the decoder accepts and jsonschema does not
        return f"it cannot be checked: {type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _message(error: Any) -> str:
    where = "/".join(str(step) for step in error.absolute_path)
    message = f"at /{where}: {error.message}"[:MAX_MESSAGE_CHARS]
    # A name in the answer may be half a surrogate pair, which UTF-8 cannot encode.
    return message.encode("utf-8", "replace").decode()


@functools.lru_cache(_NUM_PATTERNS)
def compiled(pattern: str) -> Any:
    """Return RE2's form of a pattern; None: it can match no such pattern."""
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _PATTERN_BYTES
    try:
        return re2.compile(read_pattern(pattern).search, options)
    except (BadPattern, re2.error):
        return None


def _is_found(pattern: str, text: str) -> bool | None:
    """Return whether the pattern matches somewhere in the text; None: RE2 cannot match the pattern.

    The linter reports that a pattern is not checked; the decoder may have enforced it.
    """
    expression = compiled(pattern)
    # RE2 takes no half of a surrogate pair, which JSON can escape.
    text = text.encode("utf-8", "replace").decode()
    return None if expression is None else expression.search(text) is not None


def _pattern(validator: Any, value: str, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, str) and _is_found(value, instance) is False:
        yield jsonschema.ValidationError(f"no match of {value!r} in {instance!r}")


def _pattern_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for expression, part in value.items():
        for name, item in instance.items():
            if _is_found(expression, name):
                yield from validator.descend(item, part, path=name, schema_path=expression)


def _additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    known, expressions = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, item in instance.items():
        if name not in known and all(_is_found(each, name) is False for each in expressions):
            if value is False:
                yield jsonschema.ValidationError(f"the schema has no property {name!r}")
            else:
                yield from validator.descend(item, value, path=name)


def _unevaluated_properties(
    validator: Any, value: Any, instance: Any, schema: Any
) -> Iterator[Any]:
    """Check it as `jsonschema` does, which reads patterns beside it as Python's."""
    found = jsonschema.Draft202012Validator.VALIDATORS["unevaluatedProperties"]
    with contextlib.suppress(re.error):
        yield from found(validator, value, instance, schema)


def _has_format(is_valid: Callable[[str], bool], value: Any) -> bool:
    return not isinstance(value, str) or is_valid(value)


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Accept anything: the linter reports that the keyword is not checked."""
    yield from ()


def _multiple_of(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "number") and not is_multiple(instance, value):
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {value}")
