"""Why an adapter is rejected, in words that its owner can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from contract.adapters.problems import AdapterProblems

MAX_REASONS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """One problem: `field` is a file, a config field or a tensor's name."""

    field: str
    message: str


class Rejected(Exception):
    """Raised with all problems of an adapter's files, or the first and the number of others."""

    def __init__(self, reasons: Sequence[Reason], *, num_more: int = 0) -> None:
        super().__init__("; ".join(f"{reason.field}: {reason.message}" for reason in reasons))
        self.reasons = tuple(reasons)
        self._num_more = num_more

    @classmethod
    def because(cls, field: str, message: str) -> Rejected:
        return cls([Reason(field, message)])

    @classmethod
    def of(cls, found: AdapterProblems) -> Rejected:
        return cls(
            [Reason(problem.field or problem.file, problem.message) for problem in found.problems]
        )

    def as_json(self) -> list[dict[str, str]]:
        """Return the rows to store: the first `MAX_REASONS`, and the number of the others."""
        rows = [dataclasses.asdict(reason) for reason in self.reasons[:MAX_REASONS]]
        if more := max(0, len(self.reasons) - MAX_REASONS) + self._num_more:
            rows.append({"field": "", "message": f"and {more} more problems"})
        return rows
