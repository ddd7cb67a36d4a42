"""The worker pool for operators: its queues, and the order to a worker to drain."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import transaction

from contract import protocol
from contract.queue import fair_queue
from controlplane.audit.services import record_named
from controlplane.errors import NotFound
from controlplane.infra.locks import lock_until_commit
from controlplane.infra.redis_client import redis_client
from controlplane.queue.workers import WorkerStatus, workers

#: Length of a worker's order stream: orders are few, and older ones have been read.
_MAX_ORDERS = 1000
CLASSES = {"interactive": fair_queue.INTERACTIVE, "batch": fair_queue.BATCH}


def worker_get(*, worker_id: str) -> WorkerStatus:
    """Return the worker. Raises NotFound, Unavailable when Redis does not answer."""
    for worker in workers():
        if worker.heartbeat.worker_id == worker_id:
            return worker
    raise NotFound("There is no such worker.")


@transaction.atomic
def worker_drain(*, worker_id: str) -> bool:
    """Tell a worker to finish its requests and take no more. Raises NotFound, Unavailable.

    -> whether it was told; it is told once, however often one asks until its heartbeat says so.
    """
    lock_until_commit(f"drain {worker_id}")
    if worker_get(worker_id=worker_id).heartbeat.draining:
        return False
    order = protocol.ControlMessage(action=protocol.Control.DRAIN)
    key = protocol.control_key(settings.POOL, worker_id)
    with redis_client() as client:
        if _was_told(client, key, order):
            return False
        record_named("drained", "worker", worker_id, after={"pool": settings.POOL})
        client.xadd(key, {protocol.PAYLOAD_FIELD: order.encode()}, maxlen=_MAX_ORDERS)
    return True


def _was_told(client: Any, key: str, order: protocol.ControlMessage) -> bool:
    """Whether a worker got an order so lately that its heartbeat may not show it yet."""
    seconds, _ = client.time()
    oldest = int((seconds - protocol.HEARTBEAT_TIMEOUT_S) * 1000)
    payload = order.encode()
    entries = client.xrange(key, min=oldest, count=_MAX_ORDERS)
    return any(fields.get(protocol.PAYLOAD_FIELD) == payload for _, fields in entries)


def queues() -> list[dict[str, Any]]:
    """Return what waits, per base model: requests, their tokens, and tenants per class.

    Raises Unavailable when Redis does not answer.
    """
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
            for label, letter in CLASSES.items():
                row[f"{label}_tenants"] = client.zcard(f"{name}:{letter}")
            found.append(row)
    return found
