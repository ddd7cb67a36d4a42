"""Limit a runner's requests to a share of the places that other requests leave free."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator

from controlplane.queue.workers import WorkerStatus

#: Largest share of the workers' places for batches and all other requests together.
SHARE = 0.75
#: Time until the workers' heartbeats are read again.
LOOK_S = 0.5


class Concurrency:
    """The places for requests of one runner, shared evenly by its batches.

    Requests of other runners count as other requests, so several runners divide the share.

    workers  the pool as it stands
    most     places, however large the pool is
    """

    def __init__(self, workers: Callable[[], list[WorkerStatus]], *, most: int) -> None:
        self._workers = workers
        self._most = most
        self._taken: Counter[uuid.UUID] = Counter()
        self._batches: set[uuid.UUID] = set()
        #: One line of each batch waits for a place; the others wait for their turn.
        self._turns: defaultdict[uuid.UUID, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._waiting: dict[uuid.UUID, asyncio.Future[None]] = {}
        self._served = itertools.count(1)
        self._last_served: dict[uuid.UUID, int] = {}

    @contextlib.contextmanager
    def joined(self, batch_id: uuid.UUID) -> Iterator[None]:
        """Give the batch a share of the places inside the block."""
        self._batches.add(batch_id)
        try:
            yield
        finally:
            self._batches.discard(batch_id)
            self._turns.pop(batch_id, None)
            self._last_served.pop(batch_id, None)

    @contextlib.asynccontextmanager
    async def place(self, batch_id: uuid.UUID, *, is_taken: bool = False) -> AsyncIterator[None]:
        """Hold a place of the batch; wait for it, unless the request is under way already."""
        if is_taken:
            self._take(batch_id)
        else:
            async with self._turns[batch_id]:
                while not self._has_room(batch_id):
                    await self._wait(batch_id)
                self._take(batch_id)
        self._wake()  # another line, which let this one go first, may find a place now
        try:
            yield
        finally:
            self._taken[batch_id] -= 1
            if not self._taken[batch_id]:
                del self._taken[batch_id]
            self._wake()

    def _take(self, batch_id: uuid.UUID) -> None:
        self._taken[batch_id] += 1
        self._last_served[batch_id] = next(self._served)

    async def _wait(self, batch_id: uuid.UUID) -> None:
        """Wait until a place is free, or the heartbeats must be read again."""
        turn = self._waiting[batch_id] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({turn}, timeout=LOOK_S)
        finally:
            del self._waiting[batch_id]

    def _wake(self) -> None:
        """Wake all that wait; those whose turn it is not wait again."""
        for turn in self._waiting.values():
            if not turn.done():
                turn.set_result(None)

    def limit(self) -> int:
        """Return the number of places now, taken ones included; at least one."""
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
        if self.num_taken >= limit or self._taken[batch_id] >= own:
            return False
        rank = self._rank(batch_id)
        return all(rank <= self._rank(other) for other in self._waiting)

    def _rank(self, batch_id: uuid.UUID) -> tuple[int, int]:
        """Rank the batch with the fewest places first, then the one served longest ago."""
        return self._taken[batch_id], self._last_served.get(batch_id, 0)
