"""The process that runs batches; several may run, each with batches of its own.

Its requests wait in the fair queue's batch class. If the runner dies, they continue, and another
runner takes its batches up within `leases.LEASE`; if it is told to stop, another does at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from functools import partial

from django.db import Error as DatabaseError

from controlplane.errors import Unavailable
from controlplane.files.batches.concurrency import Concurrency
from controlplane.files.batches.execution import Execution, in_batch_thread
from controlplane.files.batches.leases import Lease, claim
from controlplane.infra.health.liveness import note_alive, show_alive
from controlplane.queue.dispatcher import Dispatcher, close_dispatcher, get_dispatcher
from controlplane.tenancy.row_lease import LeaseLost

log = logging.getLogger(__name__)

#: Largest number of batches of a runner at a time.
MAX_BATCHES = 64
LOOK_S = 1.0
#: Number of attempts after which a batch that fails again is given up.
MAX_TURNS = 20


class Runner:
    """A loop that takes up batches and works on them until `stop` is set.

    max_in_flight  requests at a time, whatever the pool could take
    """

    def __init__(self, *, max_in_flight: int) -> None:
        self.stop = asyncio.Event()
        self._max_in_flight = max_in_flight
        self._running: dict[asyncio.Task[None], uuid.UUID] = {}

    async def run(self) -> None:
        """Work until told to stop; then other runners take the batches up, and nothing is lost."""
        dispatcher = await self._dispatcher()
        if dispatcher is None:
            return
        concurrency = Concurrency(lambda: dispatcher.workers.statuses, most=self._max_in_flight)
        try:
            while not self.stop.is_set():
                await self._take_up(concurrency)
                await self._pause()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await close_dispatcher()

    async def _dispatcher(self) -> Dispatcher | None:
        """Wait for the dispatcher; None when it is time to stop."""
        while not self.stop.is_set():
            try:
                return await get_dispatcher()
            except Unavailable as error:
                log.warning("waiting for Redis: %s", error)
                await self._pause()
        return None

    async def _pause(self) -> None:
        note_alive()
        await asyncio.to_thread(show_alive, "batch_runner")
        try:
            await asyncio.wait_for(self.stop.wait(), LOOK_S)
        except TimeoutError:
            return

    async def _take_up(self, concurrency: Concurrency) -> None:
        """Claim waiting batches, up to `MAX_BATCHES`."""
        while len(self._running) < MAX_BATCHES:
            at_work = list(self._running.values())
            try:
                lease = await in_batch_thread(partial(claim, at_work))
            except DatabaseError as error:
                log.warning("waiting for the database: %r", error)
                return
            if lease is None:
                return
            execution = Execution(lease, concurrency)
            task = asyncio.create_task(self._work(lease, execution))
            self._running[task] = lease.row_id
            task.add_done_callback(self._running.pop)

    async def _work(self, lease: Lease, execution: Execution) -> None:
        log.info("batch %s is taken up", lease.row_id)
        try:
            await execution.run()
        except Exception:  # the others continue; this one is tried again when its lease is over
            log.exception("batch %s failed", lease.row_id)
            if lease.fence >= MAX_TURNS:
                with contextlib.suppress(DatabaseError, LeaseLost):
                    await execution.give_up()
