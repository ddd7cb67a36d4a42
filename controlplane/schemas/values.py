"""Keywords on plain values (types, numbers, strings), and those that the decoder supports."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from contract.schemas import formats
from contract.schemas.ecma_regex import BadPattern
from contract.schemas.patterns import Pattern, read_pattern
from controlplane.schemas.findings import BadSchema, Status
from controlplane.schemas.pointers import join
from controlplane.schemas.walker import Handler, Node, Walk, annotation

#: Largest step in units of its last digit: the number of states of the decoder's automaton.
MAX_STEP = 2_000
MIN_BOUND, MAX_BOUND = 1e-12, 1e17
#: Largest length or count: the model's context ends longer strings and arrays first.
MAX_COUNT = 1_000_000


def native(keyword: str) -> Handler:
    """Handle a keyword that the decoder enforces unchanged."""

    def handle(walk: Walk, node: Node, value: Any) -> None:
        walk.keep(node, keyword, value)

    return handle


def at_least(keyword: str) -> Handler:
    """Handle a minimal length or count: no answer can satisfy one that is too large."""

    def handle(walk: Walk, node: Node, value: Any) -> None:
        if value > MAX_COUNT:
            raise BadSchema(f"asks for more than {MAX_COUNT}", join(node.at, keyword))
        walk.keep(node, keyword, int(value))

    return handle


def at_most(keyword: str) -> Handler:
    """Handle a maximal length or count: one that no answer can reach is dropped."""

    def handle(walk: Walk, node: Node, value: Any) -> None:
        if value > MAX_COUNT:
            walk.note(node, keyword, Status.ENFORCED, "no answer is as long")
        else:
            walk.keep(node, keyword, int(value))

    return handle


def bound(keyword: str) -> Handler:
    """Handle a bound of numbers: enforced digit by digit, so only with few digits."""

    def handle(walk: Walk, node: Node, value: Any) -> None:
        is_short = value == 0 or MIN_BOUND <= abs(value) <= MAX_BOUND
        if is_short or node.types == ["integer"]:
            walk.keep(node, keyword, value)
        else:
            walk.check_later(node, keyword, "enforced where the bound has few digits")

    return handle


def multiple_of(walk: Walk, node: Node, value: Any) -> None:
    step = Decimal(str(value))
    digits = abs(int(step.scaleb(-_exponent(step))))
    if digits > MAX_STEP:
        walk.check_later(node, "multipleOf", f"enforced for steps of up to {MAX_STEP} units")
    elif _as_the_decoder_reads(float(value)) != step:
        walk.check_later(node, "multipleOf", "the decoder does not read this number exactly")
    else:
        walk.keep(node, "multipleOf", value)


def _exponent(value: Decimal) -> int:
    """Return the exponent of the last digit that is not zero, at most 0."""
    return min(int(value.normalize().as_tuple().exponent), 0)


def _as_the_decoder_reads(value: float) -> Decimal:
    """Return the decoder's value of a step, whose point it shifts in binary."""
    places = 0
    while not value.is_integer():
        value, places = value * 10.0, places + 1
    return Decimal(int(value)).scaleb(-places)


def pattern(walk: Walk, node: Node, value: str) -> None:
    read = _read(walk, node, value)
    if read is None:
        return
    if read.whole is None:
        walk.check_later(node, "pattern", "anchors and word boundaries inside are only checked")
        return
    node.also.append({"pattern": f"^{read.whole}$"})
    walk.note(node, "pattern", Status.ENFORCED)


def _read(walk: Walk, node: Node, value: str) -> Pattern | None:
    try:
        return read_pattern(value)
    except BadPattern as error:
        if error.is_invalid:
            raise BadSchema(f"has a pattern that {error}", join(node.at, "pattern")) from error
        walk.note(node, "pattern", Status.UNSUPPORTED, f"the pattern {error}")
        return None


def format_(walk: Walk, node: Node, value: str) -> None:
    if value in formats.PATTERNS:
        node.also.append({"pattern": f"^(?:{formats.PATTERNS[value]})$"})
        walk.note(node, "format", Status.ENFORCED)
    elif value in formats.NATIVE:
        walk.keep(node, "format", value)
    elif value in formats.CHECKED:
        walk.note(node, "format", Status.CHECKED, f"the decoder does not know {value!r}")
    else:
        walk.note(node, "format", Status.UNSUPPORTED, f"there is no check of {value[:50]!r}")


_NATIVE = ("type", "enum", "const")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_ANNOTATIONS = (
    "$anchor", "$comment", "$schema", "contentEncoding", "contentMediaType", "contentSchema",
    "default", "deprecated", "description", "discriminator", "example", "examples", "externalDocs",
    "readOnly", "title", "writeOnly", "xml",
)  # fmt: skip

HANDLERS: dict[str, Handler] = {
    **{keyword: native(keyword) for keyword in _NATIVE},
    **{keyword: bound(keyword) for keyword in _BOUNDS},
    **{keyword: annotation(keyword) for keyword in _ANNOTATIONS},
    **{keyword: at_least(keyword) for keyword in ("minLength", "minItems")},
    **{keyword: at_most(keyword) for keyword in ("maxLength", "maxItems")},
    "multipleOf": multiple_of,
    "pattern": pattern,
    "format": format_,
}
