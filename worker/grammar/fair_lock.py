"""FairLock: a lock that tenants take in turn, so that a tenant waits for one job of each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator


class FairLock:
    """Gives one turn at a time to the tenants that wait, in rotation."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it until the block ends."""
        if self._is_taken:
            mine = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant_id, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if not mine.cancelled():  # the turn was passed to us just before the cancellation
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            tenant_id, futures = self._waiting.popitem(last=False)
            future = futures.popleft()
            if futures:
                self._waiting[tenant_id] = futures
            if not future.done():
                future.set_result(None)
                return
        self._is_taken = False
