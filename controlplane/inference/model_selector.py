"""What a request names as its model, before anybody knows whether there is such a thing."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSelector:
    """What a body says of the model: names, in the order of the body.

    label    what the answer, usage and logs call it
    weights  of the adapters of a blend; None of the body's `model`
    params   the fields of the body that the names are in
    """

    label: str
    names: tuple[str, ...]
    weights: tuple[float | None, ...] = (None,)
    params: tuple[str, ...] = ("model",)

    @classmethod
    def model(cls, name: str) -> ModelSelector:
        """One model and nothing else."""
        return cls(label=name, names=(name,))
