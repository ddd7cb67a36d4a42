"""The worker pool for operators: its queues, and the order to a worker to drain."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import transaction

from contract import protocol
from contract.queue import fair_queue
from controlplane.audit.services import record_named
from controlplane.errors import NotFound
from controlplane.infra.redis_client import redis_client
from controlplane.queue.workers import WorkerStatus, workers

#: Length of a worker's order stream: orders are few, and older ones have been read.
_MAX_ORDERS = 1000


def worker_get(*, worker_id: str) -> WorkerStatus:
    """Return the worker. Raises NotFound, Unavailable when Redis does not answer."""
    for worker in workers():
        if worker.heartbeat.worker_id == worker_id:
            return worker
    raise NotFound("There is no such worker.")


@transaction.atomic
def worker_drain(*, worker_id: str) -> None:
    """Tell a worker to finish its requests and take no more. Raises NotFound, Unavailable."""
    worker_get(worker_id=worker_id)
    record_named("drained", "worker", worker_id, after={"pool": settings.POOL})
    order = protocol.ControlMessage(action=protocol.Control.DRAIN)
    key = protocol.control_key(settings.POOL, worker_id)
    with redis_client() as client:
        client.xadd(key, {protocol.PAYLOAD_FIELD: order.encode()}, maxlen=_MAX_ORDERS)


def queues() -> list[dict[str, Any]]:
    """Return what waits, per base model: requests, their tokens, and tenants per class.

    Raises Unavailable when Redis does not answer.
    """
    classes = {"interactive": fair_queue.INTERACTIVE, "batch": fair_queue.BATCH}
    found = []
    with redis_client() as client:
        for key in sorted(client.smembers(fair_queue.queues_key(settings.POOL))):
            name = key.decode()
            requests, tokens = client.hmget(f"{name}:sums", "n", "*")
            row: dict[str, Any] = {
                "base_model": name.removeprefix(fair_queue.queue_key(settings.POOL, "")),
                "waiting_requests": int(requests or 0),
                "waiting_tokens": int(tokens or 0),
            }
            for label, letter in classes.items():
                row[f"{label}_tenants"] = client.zcard(f"{name}:{letter}")
            found.append(row)
    return found
