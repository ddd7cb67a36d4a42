"""The base classes of all bodies of the gateway."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from contract.ranges import Range

#: Number of fields in one object; more than any body has.
MAX_FIELDS = 100
#: For lists of unbounded length: stop at the first fault. Otherwise pydantic keeps an error, of a
#: kilobyte or two, for each faulty item.
FirstFault: Any = Field(fail_fast=True)
#: A short text that clients give for their own ends.
Label = Annotated[str | None, Field(max_length=512)]


class Body(BaseModel):
    """A strict body: unknown fields are refused, a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        """Count the fields before they are checked: each unknown one is an error of its own."""
        return _bounded(value, MAX_FIELDS)


class Replayed(Body):
    """Part of an answer that its client sends back. Unknown fields are ignored, since each library
    adds some of its own; only the body's length bounds them."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        return value


def without_nul(value: str) -> str:
    """Return the text if PostgreSQL can keep it; raise otherwise."""
    if "\0" in value:
        raise PydanticCustomError("value_error", "must not have null characters")
    return value


def refused(advice: str, *, also_empty: bool = False) -> AfterValidator:
    """Refuse a field for what the platform cannot do, and say what to do instead.

    also_empty  whether an empty value asks for it, too; null never does
    """

    def check(value: Any) -> Any:
        is_empty = value is False or value in ("", [], {})
        if value is None or (is_empty and not also_empty):
            return None
        raise unsupported(advice)

    return AfterValidator(check)


def unsupported(advice: str, what: str = "is not supported") -> PydanticCustomError:
    """Return the error for a value that the platform cannot serve: what it is, what to do."""
    return PydanticCustomError("unsupported", "{what}: {advice}", {"what": what, "advice": advice})


def within(allowed: Range) -> Any:
    """Return the bounds of a field whose numbers are in a range."""
    least: dict[str, Any] = {"gt" if allowed.is_open else "ge": allowed.least}
    return Field(le=allowed.most, **least)


def at_most(number: int) -> BeforeValidator:
    """Bound the number of an object's fields before each is checked."""
    return BeforeValidator(lambda value: _bounded(value, number))


def _bounded(value: Any, number: int) -> Any:
    if isinstance(value, dict) and len(value) > number:
        raise PydanticCustomError("too_long", f"has {len(value)} fields; {number} is the limit")
    return value
