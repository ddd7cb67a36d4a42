"""Parse a model's name, without a look at the database."""

from __future__ import annotations

import re
from typing import NamedTuple

_PLAIN = re.compile(r"([a-z0-9][a-z0-9._-]{0,62})(?:@([1-9][0-9]{0,8}))?", re.ASCII)
_SLUG = r"([a-z0-9][a-z0-9._-]{0,62})"
_FINE_TUNED = re.compile(rf"ft:{_SLUG}:{_SLUG}:{_SLUG}:([1-9][0-9]{{0,8}})", re.ASCII)


class ModelName(NamedTuple):
    """The parts of `adapter`, `adapter@3` or `ft:<base model>:<tenant>:adapter:3`.

    The last two name the same version. `base_model` and `tenant` are None in the first two forms.
    """

    name: str
    number: int | None
    base_model: str | None = None
    tenant: str | None = None


def parse_model_name(text: str) -> ModelName | None:
    """Return the parts of a model's name, or None if it has none of the forms."""
    if match := _FINE_TUNED.fullmatch(text):
        base_model, tenant, name, number = match.groups()
        return ModelName(name, int(number), base_model, tenant)
    if match := _PLAIN.fullmatch(text):
        return ModelName(match[1], int(match[2]) if match[2] else None)
    return None


def plain_name(text: str) -> str:
    """Return the name that rules use: `adapter@3` for `ft:base:tenant:adapter:3`, else `text`."""
    parsed = parse_model_name(text)
    return text if parsed is None or parsed.base_model is None else f"{parsed.name}@{parsed.number}"
