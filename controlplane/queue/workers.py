"""The workers of the pool, as their heartbeats describe them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from django.conf import settings

from contract.messages import protocol
from contract.messages.protocol import Heartbeat
from controlplane.infra.redis_client import redis_client

log = logging.getLogger(__name__)


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
        """Return whether its last heartbeat is recent: it is probably being restarted."""
        return self.silent_s < protocol.WORKER_GRACE_S


def workers() -> list[WorkerStatus]:
    """Return the pool's workers for people to see, dead ones included for a while.

    Raises Unavailable when Redis does not answer.
    """
    with redis_client() as client:
        return read_workers(client)


def read_workers(client: Any) -> list[WorkerStatus]:
    """Do as `workers`, through an open client of Redis."""
    pipe: Any = client.pipeline(transaction=False)
    pipe.time().zrange(protocol.workers_key(settings.POOL), 0, -1, withscores=True)
    time, scores = pipe.execute()
    for worker_id, _ in scores:
        pipe.hget(protocol.worker_key(settings.POOL, worker_id.decode()), protocol.PAYLOAD_FIELD)
    return read_statuses(time, scores, pipe.execute())


def read_statuses(
    time: tuple[int, int], scores: Iterable[tuple[bytes, float]], heartbeats: list[bytes | None]
) -> list[WorkerStatus]:
    """Read what Redis answered to TIME, ZRANGE of the pool, and HGET of each worker in it.

    A heartbeat that cannot be read hides its worker alone.
    """
    now = time[0] + time[1] / 1e6
    statuses = []
    for (worker_id, score), payload in zip(scores, heartbeats, strict=True):
        if payload is None:
            continue
        try:
            heartbeat = Heartbeat.decode(payload)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("the heartbeat of %r cannot be read: %r", worker_id, error)
            continue
        statuses.append(WorkerStatus(heartbeat=heartbeat, silent_s=max(0.0, now - score)))
    return statuses


def precisions(beats: Iterable[Heartbeat]) -> list[dict[str, str]]:
    """Return in which precisions the workers answer, each once: {"weights", "kv", "adapters"}."""
    names = ("weights", "kv", "adapters")
    told = (beat.precision for beat in beats if beat.precision)
    found = {tuple(each.get(name, "") for name in names) for each in told}
    return [dict(zip(names, values, strict=True)) for values in sorted(found)]


def has_copies(told: Sequence[dict[str, str]]) -> bool:
    """Return whether all workers of these precisions keep adapters in FP8."""
    return bool(told) and all(each["adapters"] == "fp8" for each in told)


def is_served(workers: Iterable[WorkerStatus], base_model: str) -> bool:
    """Return whether a worker takes the base model's requests, or is probably restarting."""
    return any(
        worker.heartbeat.base_model == base_model
        and not worker.heartbeat.draining
        and worker.may_return
        for worker in workers
    )


def served_models(workers: Sequence[WorkerStatus]) -> set[str]:
    """Return the base models that are served."""
    known = {worker.heartbeat.base_model for worker in workers}
    return {base_model for base_model in known if is_served(workers, base_model)}


class Speed:
    """The tokens a second of all workers of a base model together, when all are full.

    Workers that have room show less than they could, and so does the first heartbeat after: both
    say nothing.
    """

    #: Weight of the newest heartbeats.
    SHARE = 0.3

    def __init__(self) -> None:
        self._tokens_per_s: dict[str, float] = {}
        self._steps: dict[str, tuple[int, ...]] = {}  # at the last heartbeats with all full

    def observe(self, workers: Iterable[WorkerStatus]) -> None:
        """Take in the workers' newest heartbeats."""
        ready: dict[str, list[Heartbeat]] = {}
        for worker in workers:
            if worker.is_ready:
                ready.setdefault(worker.heartbeat.base_model, []).append(worker.heartbeat)
        for base_model, beats in ready.items():
            if not all(0 < beat.max_running <= beat.running for beat in beats):
                self._steps.pop(base_model, None)
                continue
            steps = tuple(beat.step for beat in beats)
            before = self._steps.get(base_model)
            if before is not None and all(
                now != then for now, then in zip(steps, before, strict=False)
            ):
                self._learn(base_model, sum(beat.tokens_per_s for beat in beats))
            if before is None or steps != before:
                self._steps[base_model] = steps

    def _learn(self, base_model: str, speed: float) -> None:
        before = self._tokens_per_s.get(base_model, speed)
        self._tokens_per_s[base_model] = before + self.SHARE * (speed - before)

    def tokens_per_s(self, base_model: str) -> float:
        """Return the base model's tokens a second; 0 while nothing is known."""
        return round(self._tokens_per_s.get(base_model, 0.0), 3)
