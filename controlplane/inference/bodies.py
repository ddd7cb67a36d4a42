"""What all bodies of the gateway have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

#: Of one object; more than any body here knows.
MAX_FIELDS = 100
#: For lists of unbounded length: one fault is enough. pydantic keeps an error, of a kilobyte or
#: two, for each item at fault otherwise.
FirstFault: Any = Field(fail_fast=True)


class Body(BaseModel):
    """Strict: a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        """Unknown fields are an error each, so they are counted before they are looked at."""
        return _bounded(value, MAX_FIELDS)


class Replayed(Body):
    """What an answer said, as its client sends it back: names nobody here knows are ignored, for
    each library adds some of its own. Only the body's length bounds them."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        return value


def without_nul(value: str) -> str:
    """Text that PostgreSQL can keep."""
    if "\0" in value:
        raise PydanticCustomError("value_error", "must not have null characters")
    return value


def at_most(number: int) -> BeforeValidator:
    """For objects with names of the client's: the bound comes before the look at each entry."""
    return BeforeValidator(lambda value: _bounded(value, number))


def _bounded(value: Any, number: int) -> Any:
    if isinstance(value, dict) and len(value) > number:
        raise PydanticCustomError("too_long", f"has {len(value)} fields; {number} is the limit")
    return value
