"""The workers of the pool: as they describe themselves, and which one a job should go to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import redis
from django.conf import settings
from redis.exceptions import RedisError

from controlplane.errors import Unavailable
from worker import protocol
from worker.protocol import GenerateJob, Heartbeat

#: Fetching an adapter is worth this many places in a worker's queue.
NOT_RESIDENT_COST = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker as it last described itself, and how long ago that was."""

    heartbeat: Heartbeat
    silent_s: float

    @property
    def is_alive(self) -> bool:
        return self.silent_s < protocol.HEARTBEAT_TIMEOUT_S

    @property
    def is_ready(self) -> bool:
        return self.is_alive and not self.heartbeat.loading

    @property
    def may_return(self) -> bool:
        """Whether it was heard of so recently that it is probably being restarted."""
        return self.silent_s < protocol.WORKER_GRACE_S


def workers() -> list[WorkerStatus]:
    """The pool's workers, dead ones included for a while; for people to look at.

    Raises Unavailable when Redis does not answer.
    """
    try:
        with redis.Redis.from_url(settings.REDIS_URL, protocol=2, socket_timeout=5) as client:
            pipe: Any = client.pipeline(transaction=False)
            pipe.time().zrange(protocol.workers_key(settings.POOL), 0, -1, withscores=True)
            time, scores = pipe.execute()
            for worker_id, _ in scores:
                pipe.hget(protocol.worker_key(settings.POOL, worker_id.decode()), "m")
            return read_statuses(time, scores, pipe.execute())
    except RedisError as error:
        raise Unavailable("The queue does not answer.") from error


def read_statuses(
    time: tuple[int, int], scores: Iterable[tuple[bytes, float]], heartbeats: list[bytes | None]
) -> list[WorkerStatus]:
    """What Redis answered to TIME, ZRANGE of the pool, and HGET of each worker in it."""
    now = time[0] + time[1] / 1e6
    return [
        WorkerStatus(heartbeat=Heartbeat.decode(payload), silent_s=max(0.0, now - score))
        for (_, score), payload in zip(scores, heartbeats, strict=True)
        if payload is not None
    ]


def best_worker(
    workers: Iterable[WorkerStatus], job: GenerateJob, load: Callable[[WorkerStatus], int]
) -> WorkerStatus | None:
    """The least loaded worker, preferring one that has the job's adapters in its memory.

    A worker that is loading or probably being restarted is chosen only when no other is there, and
    then the one heard of last: it is the likeliest to come back.
    """
    fitting = [
        worker
        for worker in workers
        if worker.heartbeat.base_model == job.base_model and not worker.heartbeat.draining
    ]
    candidates = [worker for worker in fitting if worker.is_ready]
    if not candidates:
        returning = [worker for worker in fitting if worker.may_return]
        return min(returning, key=lambda worker: worker.silent_s, default=None)
    digests = {ref.digest for ref in job.adapters}

    def cost(worker: WorkerStatus) -> int:
        is_resident = digests <= set(worker.heartbeat.resident_digests)
        return load(worker) + (0 if is_resident else NOT_RESIDENT_COST)

    return min(candidates, key=cost, default=None)
