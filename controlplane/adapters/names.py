"""What a model's name says, before anybody knows whether there is such a thing."""

from __future__ import annotations

import re
from typing import NamedTuple

_PLAIN = re.compile(r"([a-z0-9][a-z0-9._-]{0,62})(?:@([1-9][0-9]{0,8}))?", re.ASCII)
_SLUG = r"([a-z0-9][a-z0-9._-]{0,62})"
_FINE_TUNED = re.compile(rf"ft:{_SLUG}:{_SLUG}:{_SLUG}:([1-9][0-9]{{0,8}})", re.ASCII)


class ModelName(NamedTuple):
    """`adapter`, `adapter@3`, or `ft:<base model>:<tenant>:adapter:3`, which is the same version
    of it; `base_model` and `tenant` are None where the name does not say."""

    name: str
    number: int | None
    base_model: str | None = None
    tenant: str | None = None


def parse_model_name(text: str) -> ModelName | None:
    """None when it is no model's name."""
    if match := _FINE_TUNED.fullmatch(text):
        base_model, tenant, name, number = match.groups()
        return ModelName(name, int(number), base_model, tenant)
    if match := _PLAIN.fullmatch(text):
        return ModelName(match[1], int(match[2]) if match[2] else None)
    return None


def plain_name(text: str) -> str:
    """`ft:base:tenant:adapter:3` as `adapter@3`; anything else as it is: what rules go by."""
    parsed = parse_model_name(text)
    return text if parsed is None or parsed.base_model is None else f"{parsed.name}@{parsed.number}"
