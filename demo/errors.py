"""The error of a failed step of the demo."""

from __future__ import annotations


class StepFailed(Exception):
    """Raised when a step failed; says what failed and what to do."""

    def __init__(self, what: str, *, advice: str, details: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice
        self.details = details  # the tail of a log, an answer's body

    def __str__(self) -> str:
        parts = [self.what]
        if self.details:
            parts.append(self.details.rstrip())
        parts.append(f"What to do: {self.advice}")
        return "\n".join(parts)
