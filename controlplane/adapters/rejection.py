"""Why an adapter is refused, in words its owner can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

MAX_REASONS = 20
_MAX_SHOWN = 120


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """One thing that is wrong: `field` is a file, a config field or a tensor's name."""

    field: str
    message: str


class Rejected(Exception):
    """Raised with everything found wrong with an adapter's files."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        super().__init__("; ".join(f"{reason.field}: {reason.message}" for reason in reasons))
        self.reasons = tuple(reasons)

    @classmethod
    def because(cls, field: str, message: str) -> Rejected:
        return cls([Reason(field, message)])

    def as_json(self) -> list[dict[str, str]]:
        """For the version's row: the first `MAX_REASONS`, and how many more there are."""
        rows = [dataclasses.asdict(reason) for reason in self.reasons[:MAX_REASONS]]
        if more := len(self.reasons) - MAX_REASONS:
            if more > 0:
                rows.append({"field": "", "message": f"and {more} more of the kind"})
        return rows


def shown(value: Any) -> str:
    """A stranger's value for a message: short, and ASCII, which every store and page can take."""
    text = value if isinstance(value, str) else repr(value)
    text = text[: 2 * _MAX_SHOWN].encode("unicode_escape").decode("ascii")
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
