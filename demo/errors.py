"""How a step of the demo says that it failed."""

from __future__ import annotations


class StepFailed(Exception):
    """A step could not be done; says what failed and what to do about it."""

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
