"""The faults of an adapter's files, in words that its owner can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

_MAX_SHOWN = 120


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One fault.

    file     adapter_config.json or adapter_model.safetensors
    field    of the config, or the name of a tensor; "": the file as a whole
    message  a sentence about `field`, which it calls "it"
    """

    file: str
    field: str
    message: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.file, self.field, self.message)))


class AdapterProblems(Exception):
    """Raised with all faults; those that hide others come first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


def shown(value: Any) -> str:
    """Write an untrusted value for a message: short, and in ASCII, which all stores can take."""
    text = value if isinstance(value, str) else repr(value)
    text = text[: 2 * _MAX_SHOWN].encode("unicode_escape").decode("ascii")
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
