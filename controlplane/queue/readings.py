"""Read what is true of a pool's processes together, for the metrics of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import redis
from django.conf import settings
from prometheus_client.core import Metric

from contract.messages import protocol
from contract.queue import fair_queue
from controlplane.infra.metrics import gauge
from controlplane.infra.redis_client import redis_client
from controlplane.queue.desired_workers import FullSpeed, desired_workers
from controlplane.queue.models import DeadLetter
from controlplane.queue.workers import WorkerStatus, workers
from controlplane.tenancy.scoping import all_tenants

_TASK_QUEUES = ("ingest", "ops", "train", "inspect")
_STATES = ("ready", "loading", "draining", "silent")
_speed = FullSpeed()


def pool() -> Iterable[Metric]:
    """Return the queues and workers of the pool, and how many workers it needs."""
    name = settings.POOL
    with redis_client() as client:
        waiting = {
            key.decode().removeprefix(fair_queue.queue_key(name, "")): _sums(client, key)
            for key in client.smembers(fair_queue.queues_key(name))
        }
        ended = client.xlen(protocol.done_key(name))
        refused = client.hlen(fair_queue.quarantine_key(name))
    statuses = workers()
    _speed.observe(status.heartbeat for status in statuses if status.is_alive)
    models = sorted({*waiting, *(status.heartbeat.base_model for status in statuses)})
    of_model = {
        model: _values(
            model,
            *waiting.get(model, (0, 0)),
            [status for status in statuses if status.heartbeat.base_model == model],
        )
        for model in models
    }
    for metric, about in _ABOUT.items():
        values = [((name, model), found[metric]) for model, found in of_model.items()]
        yield gauge(metric, about, values, "pool", "base_model")
    yield _states(name, models, statuses)
    about = "Ended requests that are not in the database yet."
    yield gauge("lorikeet_usage_records_waiting", about, [((name,), ended)], "pool")
    about = "Adapters that are refused because they ended workers."
    yield gauge("lorikeet_quarantined_adapters", about, [((name,), refused)], "pool")


_ABOUT = {
    "lorikeet_queue_requests": "Requests that no worker has taken yet.",
    "lorikeet_queue_tokens": "Tokens that these may generate.",
    "lorikeet_pool_running_requests": "Requests in the engines.",
    "lorikeet_pool_capacity_requests": "Requests that the living workers can run at a time.",
    "lorikeet_pool_tokens_per_second": "Tokens that the workers generate.",
    "lorikeet_full_worker_tokens_per_second": "Of one worker when it is full; 0: not known yet.",
    "lorikeet_desired_workers": "Workers that the load needs.",
    "lorikeet_worker_silence_seconds": "Age of the oldest heartbeat.",
}


def _values(
    model: str, requests: int, tokens: int, statuses: list[WorkerStatus]
) -> dict[str, float]:
    """Return a base model's value of each metric."""
    alive = [status.heartbeat for status in statuses if status.is_alive]
    rooms = [beat.max_running for beat in alive]
    running, speed = sum(beat.running for beat in alive), _speed.of(model)
    desired = desired_workers(
        running=running,
        max_running=max(rooms, default=0),
        waiting_requests=requests,
        waiting_tokens=tokens,
        tokens_per_s=speed,
        target_wait_s=settings.TARGET_WAIT_S,
    )
    silence_s = max((status.silent_s for status in statuses), default=0.0)
    generated = sum(beat.tokens_per_s for beat in alive)
    values = (requests, tokens, running, sum(rooms), generated, speed, desired, silence_s)
    return dict(zip(_ABOUT, values, strict=True))


def _sums(client: Any, key: bytes) -> tuple[int, int]:
    requests, tokens = client.hmget(key + fair_queue.SUMS.encode(), "n", "*")
    return int(requests or 0), int(tokens or 0)


def _states(name: str, models: list[str], statuses: list[WorkerStatus]) -> Metric:
    counts = Counter((status.heartbeat.base_model, _state(status)) for status in statuses)
    values = [
        ((name, model, state), float(counts[model, state])) for model in models for state in _STATES
    ]
    about = "Workers by state; a silent one is dead, or cannot reach Redis."
    return gauge("lorikeet_workers", about, values, "pool", "base_model", "state")


def _state(status: WorkerStatus) -> str:
    if not status.is_alive:
        return "silent"
    if status.heartbeat.draining:
        return "draining"
    return "loading" if status.heartbeat.loading else "ready"


def task_queues() -> Iterable[Metric]:
    """Return how many messages wait in Celery's queues."""
    with redis.Redis.from_url(settings.CELERY_BROKER_URL, socket_timeout=5) as client:
        values: list[Any] = [((queue,), client.llen(queue)) for queue in _TASK_QUEUES]
    return [gauge("lorikeet_tasks_waiting", "Messages in Celery's queues.", values, "queue")]


def dead_letters() -> Iterable[Metric]:
    """Return the requests that were given up and not put back, and what could not be read."""
    with all_tenants(reason="letters of all tenants are counted"):
        given_up = DeadLetter.objects.filter(requeued_at__isnull=True).count()
    with redis_client() as client:
        unreadable = client.xlen(protocol.dead_letter_key(settings.POOL))
    values = [(("given up",), float(given_up)), (("unreadable",), float(unreadable))]
    about = "Requests that ended workers, and entries of Redis that nobody can read."
    return [gauge("lorikeet_dead_letters", about, values, "kind")]
