"""What a request names as its model, before it is looked up."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelector:
    """The names in a body that say what is to answer, in the order of the body.

    label    what the answer, usage and logs call it
    weights  of the adapters of a blend; None for the body's `model`
    params   the fields of the body that the names are in
    """

    label: str
    names: tuple[str, ...]
    weights: tuple[float | None, ...] = (None,)
    params: tuple[str, ...] = ("model",)

    @classmethod
    def model(cls, name: str) -> ModelSelector:
        """Select one model by its name."""
        return cls(label=name, names=(name,))
