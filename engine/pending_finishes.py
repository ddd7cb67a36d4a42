"""PendingFinishes: sequences that the next step ends early. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import EngineError
from engine.request import FinishReason
from engine.sequence import Sequence


class PendingFinishes:
    """Sequences that were cancelled, have failed or are late, each with its first reason."""

    def __init__(self) -> None:
        self._reasons: dict[Sequence, tuple[FinishReason, EngineError | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def add(
        self,
        sequences: Iterable[Sequence],
        reason: FinishReason,
        error: EngineError | None = None,
        index: int | None = None,
    ) -> None:
        """Mark these sequences of a request to end, or only the one with `index`."""
        for sequence in sequences:
            if index in (None, sequence.index):
                self._reasons.setdefault(sequence, (reason, error))

    def take(self) -> list[tuple[Sequence, FinishReason, EngineError | None]]:
        """Remove and return all sequences that have not ended in the meantime."""
        reasons, self._reasons = self._reasons, {}
        return [(s, reason, error) for s, (reason, error) in reasons.items() if not s.has_ended]
