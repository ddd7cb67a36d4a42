"""PendingFinishes: sequences that the next step ends early. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import EngineError
from engine.request import FinishReason
from engine.sequence import Sequence


class PendingFinishes:
    """Sequences that were cancelled, failed or are late, each with the first reason given."""

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
        """Let the siblings end, or that of the given index."""
        for sequence in sequences:
            if index in (None, sequence.index):
                self._reasons.setdefault(sequence, (reason, error))

    def take(self) -> list[tuple[Sequence, FinishReason, EngineError | None]]:
        """Those that have not ended meanwhile; afterwards there are none."""
        reasons, self._reasons = self._reasons, {}
        return [(s, reason, error) for s, (reason, error) in reasons.items() if not s.has_ended]
