"""How many requests a runner has under way: so many as others leave free, and not all of these."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator

from controlplane.workers import WorkerStatus

#: Of the places of the workers, batches take at most this share, less what others have.
SHARE = 0.75
#: The workers' heartbeats are looked at again after so long.
LOOK_S = 0.5


class Pace:
    """Places for requests, shared evenly by the runner's batches.

    Other runners' requests look like anybody's, so several runners divide the share among them.

    workers  the pool as it stands
    most     places, however large the pool is
    """

    def __init__(self, workers: Callable[[], list[WorkerStatus]], *, most: int) -> None:
        self._workers = workers
        self._most = most
        self._taken: Counter[uuid.UUID] = Counter()
        self._batches: set[uuid.UUID] = set()
        self._waiting: defaultdict[uuid.UUID, deque[asyncio.Future[None]]] = defaultdict(deque)

    @contextlib.contextmanager
    def joined(self, batch_id: uuid.UUID) -> Iterator[None]:
        """The batch has a part in the places meanwhile."""
        self._batches.add(batch_id)
        try:
            yield
        finally:
            self._batches.discard(batch_id)

    @contextlib.asynccontextmanager
    async def place(self, batch_id: uuid.UUID) -> AsyncIterator[None]:
        """One of the batch's places; waits for it."""
        while not self._has_room(batch_id):
            await self._wait(batch_id)
        self._taken[batch_id] += 1
        try:
            yield
        finally:
            self._taken[batch_id] -= 1
            if not self._taken[batch_id]:
                del self._taken[batch_id]
            self._wake()

    async def _wait(self, batch_id: uuid.UUID) -> None:
        """Until a place is free, or it is time to look how large the pool is now."""
        turn = asyncio.get_running_loop().create_future()
        waiting = self._waiting[batch_id]
        waiting.append(turn)
        try:
            await asyncio.wait({turn}, timeout=LOOK_S)
        finally:
            if turn in waiting:
                waiting.remove(turn)

    def _wake(self) -> None:
        """One request of each batch; whose turn it is not, waits again."""
        for batch_id, waiting in list(self._waiting.items()):
            if waiting:
                waiting.popleft().set_result(None)
            else:
                del self._waiting[batch_id]

    def limit(self) -> int:
        """Places that there are now, taken ones included; always one, so that batches go on."""
        beats = [worker.heartbeat for worker in self._workers() if worker.is_ready]
        beats = [beat for beat in beats if not beat.draining]
        capacity = sum(beat.max_running for beat in beats)
        others = max(0, sum(beat.running + beat.waiting for beat in beats) - self.num_taken)
        return max(1, min(self._most, int(capacity * SHARE) - others))

    @property
    def num_taken(self) -> int:
        return self._taken.total()

    def _has_room(self, batch_id: uuid.UUID) -> bool:
        limit = self.limit()
        own = max(1, limit // max(1, len(self._batches)))
        return self.num_taken < limit and self._taken[batch_id] < own
