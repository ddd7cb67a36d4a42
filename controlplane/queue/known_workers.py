"""A gateway's view of its pool's workers, at most about a second old."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from contract.messages import protocol
from contract.queue import fair_queue
from controlplane.errors import Unavailable
from controlplane.infra.outages import REDIS_OUTAGE
from controlplane.queue.batch_reply_stream import shielded
from controlplane.queue.workers import (
    Speed,
    WorkerStatus,
    is_served,
    read_statuses,
    served_models,
)

REFRESH_S = 1.0


class KnownWorkers:
    """Reads the workers' heartbeats again and again.

    client  of redis.asyncio
    """

    def __init__(self, client: Any, pool: str) -> None:
        self._redis = client
        self._pool = pool
        self._speed = Speed()
        self.statuses: list[WorkerStatus] = []

    async def refresh_loop(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            with contextlib.suppress(*REDIS_OUTAGE):
                await self.refresh()

    async def refresh(self) -> None:
        pipe = self._redis.pipeline(transaction=False)
        pipe.time().zrange(protocol.workers_key(self._pool), 0, -1, withscores=True)
        time, scores = await pipe.execute()
        for worker_id, _ in scores:
            pipe.hget(protocol.worker_key(self._pool, worker_id.decode()), protocol.PAYLOAD_FIELD)
        self.statuses = read_statuses(time, scores, await pipe.execute() if scores else [])
        self._speed.observe(self.statuses)

    def ids(self) -> set[bytes]:
        """Return the ids of the workers that are there or are probably being restarted."""
        return {
            worker.heartbeat.worker_id.encode() for worker in self.statuses if worker.may_return
        }

    def devices(self, base_model: str) -> set[str]:
        """Return the devices that the workers of a base model run on."""
        beats = (worker.heartbeat for worker in self.statuses)
        return {beat.device for beat in beats if beat.base_model == base_model}

    def tokens_per_s(self, base_model: str) -> float:
        """Return the speed of a base model's workers together; 0 while nothing is known."""
        return self._speed.tokens_per_s(base_model)

    async def served_models(self) -> set[str]:
        """Return the base models that requests are accepted for."""
        if not (served := served_models(self.statuses)):  # perhaps the first has only just come
            with contextlib.suppress(*REDIS_OUTAGE):
                await self.refresh()
            served = served_models(self.statuses)
        return served

    async def check_served(self, base_model: str) -> None:
        """Raise Unavailable unless a worker serves the base model, or may again soon."""
        await shielded(self._check_served(base_model))

    async def _check_served(self, base_model: str) -> None:
        if not is_served(self.statuses, base_model):  # perhaps it has only just come
            with contextlib.suppress(*REDIS_OUTAGE):
                await self.refresh()
            if not is_served(self.statuses, base_model) and not await self._may_return(base_model):
                raise Unavailable(f"No worker serves {base_model} now.", retry_after_s=5)

    async def _may_return(self, base_model: str) -> bool:
        """Return whether a worker left so recently that requests may wait for the next one."""
        pipe = self._redis.pipeline(transaction=False)
        queue = fair_queue.queue_key(self._pool, base_model)
        pipe.time().zscore(fair_queue.served_key(self._pool), queue)
        try:
            (seconds, _), heard = await pipe.execute()
        except REDIS_OUTAGE:
            return False
        return heard is not None and seconds - heard < protocol.WORKER_GRACE_S
