"""The names that a request gives as its model, before they are looked up."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelector:
    """The names in a body that say what is to answer, in the order of the body.

    label    what the answer, usage and logs call it
    weights  of the adapters of a blend; None for the body's `model`
    params   the fields of the body that the names are in
    sticky   whom the request is made for; an alias answers them always by the same target. "": the
             key's owner
    """

    label: str
    names: tuple[str, ...]
    weights: tuple[float | None, ...] = (None,)
    params: tuple[str, ...] = ("model",)
    sticky: str = dataclasses.field(default="", compare=False)

    @classmethod
    def model(cls, name: str, *, sticky: str = "") -> ModelSelector:
        """Select one model by its name."""
        return cls(label=name, names=(name,), sticky=sticky)


def sticky_of(body: Any) -> str:
    """Return whom a body says that it is for; "" if it does not say."""
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        value = getattr(body, name, None)
        if value:
            return f"{name} {value}"
    return ""
