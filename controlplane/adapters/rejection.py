"""Why an adapter is rejected, in words that its owner can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from contract.adapter_problems import AdapterProblems

MAX_REASONS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """One problem: `field` is a file, a config field or a tensor's name."""

    field: str
    message: str


class Rejected(Exception):
    """Raised with all problems of an adapter's files."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        super().__init__("; ".join(f"{reason.field}: {reason.message}" for reason in reasons))
        self.reasons = tuple(reasons)

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
        if more := len(self.reasons) - MAX_REASONS:
            if more > 0:
                rows.append({"field": "", "message": f"and {more} more problems"})
        return rows
