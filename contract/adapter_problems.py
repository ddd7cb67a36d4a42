"""What is wrong with the files of an adapter, in words its owner can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

_MAX_SHOWN = 120


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

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
    """Raised with everything found wrong, what hides the most first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = tuple(problems)


def shown(value: Any) -> str:
    """A stranger's value for a message: short, and ASCII, which every store and page can take."""
    text = value if isinstance(value, str) else repr(value)
    text = text[: 2 * _MAX_SHOWN].encode("unicode_escape").decode("ascii")
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
