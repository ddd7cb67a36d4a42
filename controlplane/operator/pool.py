"""The worker pool for operators: its queues, and the orders to a worker to drain or resume."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import transaction

from contract.messages import protocol
from contract.queue import fair_queue
from controlplane.errors import NotFound
from controlplane.events.audit.services import record_named
from controlplane.infra.locks import lock_until_commit
from controlplane.infra.redis_client import redis_client
from controlplane.queue.workers import WorkerStatus, workers

#: Length of a worker's order stream; older orders have been read.
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

    -> whether it was told; repeated calls tell it once, until its heartbeat shows the drain.
    """
    return _tell(worker_id, protocol.Control.DRAIN, "drained")


@transaction.atomic
def worker_resume(*, worker_id: str) -> bool:
    """Tell a draining worker that still has requests to take others again.

    -> whether it was told, as above. Raises NotFound, Unavailable.
    """
    return _tell(worker_id, protocol.Control.RESUME, "resumed")


def _tell(worker_id: str, action: protocol.Control, recorded: str) -> bool:
    lock_until_commit(f"drain {worker_id}")
    drains = worker_get(worker_id=worker_id).heartbeat.draining
    key = protocol.control_key(settings.POOL, worker_id)
    with redis_client() as client:
        newest = _told_lately(client, key)
        if (newest or (protocol.Control.DRAIN if drains else protocol.Control.RESUME)) == action:
            return False
        record_named(recorded, "worker", worker_id, after={"pool": settings.POOL})
        order = protocol.ControlMessage(action=action)
        client.xadd(key, {protocol.PAYLOAD_FIELD: order.encode()}, maxlen=_MAX_ORDERS)
    return True


def _told_lately(client: Any, key: str) -> protocol.Control | None:
    """Return the newest of these orders, if the heartbeat may not show it yet."""
    seconds, _ = client.time()
    oldest = int((seconds - protocol.HEARTBEAT_TIMEOUT_S) * 1000)
    payloads = {
        protocol.ControlMessage(action=action).encode(): action
        for action in (protocol.Control.DRAIN, protocol.Control.RESUME)
    }
    for _, fields in client.xrevrange(key, min=oldest, count=_MAX_ORDERS):
        if action := payloads.get(fields.get(protocol.PAYLOAD_FIELD)):
            return action
    return None


def queues() -> list[dict[str, Any]]:
    """Return by base model the waiting requests, their tokens, and tenants by class.

    Raises Unavailable when Redis does not answer.
    """
    found = []
    with redis_client() as client:
        for key in sorted(client.smembers(fair_queue.queues_key(settings.POOL))):
            name = key.decode()
            requests, tokens = client.hmget(name + fair_queue.SUMS, "n", "*")
            row: dict[str, Any] = {
                "base_model": name.removeprefix(fair_queue.queue_key(settings.POOL, "")),
                "waiting_requests": int(requests or 0),
                "waiting_tokens": int(tokens or 0),
            }
            for label, letter in CLASSES.items():
                row[f"{label}_tenants"] = client.zcard(f"{name}:{letter}")
            found.append(row)
    return found
