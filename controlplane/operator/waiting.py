"""The requests that wait for a worker, by class and tenant, without their prompts."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.conf import settings

from contract.messages import protocol
from contract.queue import fair_queue
from controlplane.infra.redis_client import redis_client
from controlplane.operator.pool import CLASSES

#: Number of tenants shown for each class.
TOP = 20
#: Number of a class's tenants that are read; with more, the sums are lower bounds.
_MAX_TENANTS = 10_000
#: Number of commands in a round trip, so that Redis answers others in between.
_CHUNK = 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """A tenant's waiting requests of one class."""

    tenant_id: str
    requests: int
    tokens: int
    since: float | None  # Unix seconds, of its oldest; None: it has just been taken


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassQueue:
    """A base model's waiting requests of one class."""

    base_model: str
    name: str  # "interactive" or "batch"
    requests: int
    tokens: int
    num_tenants: int
    oldest_s: float  # waiting time of the oldest
    top: tuple[Backlog, ...]  # the largest, at most TOP
    is_cut: bool  # whether there are more tenants than were read


def class_queues() -> list[ClassQueue]:
    """Return the queues of the pool, two for each base model. Raises Unavailable."""
    pool = settings.POOL
    found = []
    with redis_client() as client:
        now = client.time()[0]
        for key in sorted(client.smembers(fair_queue.queues_key(pool))):
            queue = key.decode()
            base_model = queue.removeprefix(fair_queue.queue_key(pool, ""))
            sums = client.hgetall(queue + fair_queue.SUMS)
            for name, letter in CLASSES.items():
                found.append(_read(client, queue, base_model, name, letter, sums, now))
    return found


def _read(
    client: Any,
    queue: str,
    base_model: str,
    name: str,
    letter: str,
    sums: dict[bytes, bytes],
    now: float,
) -> ClassQueue:
    number = client.zcard(f"{queue}:{letter}")
    members = client.zrange(f"{queue}:{letter}", 0, _MAX_TENANTS - 1)
    tenants = [member.decode() for member in members]
    lists = [f"{queue}:{letter}:{tenant}" for tenant in tenants]
    lengths = _each(client, [("LLEN", key) for key in lists])
    heads = _each(client, [("LINDEX", key, 0) for key in lists])
    ids = [(head or b"").split(b" ")[0].decode() for head in heads]
    jobs = [protocol.job_key(settings.POOL, request_id) for request_id in ids]
    since = _each(client, [("HGET", job, "since") for job in jobs])
    backlogs = [
        Backlog(
            tenant_id=tenant,
            requests=length,
            tokens=int(sums.get(f"{letter}:{tenant}".encode(), 0)),
            since=float(at) if at else None,
        )
        for tenant, length, at in zip(tenants, lengths, since, strict=True)
    ]
    ages = [now - backlog.since for backlog in backlogs if backlog.since]
    return ClassQueue(
        base_model=base_model,
        name=name,
        requests=sum(backlog.requests for backlog in backlogs),
        tokens=sum(backlog.tokens for backlog in backlogs),
        num_tenants=number,
        oldest_s=max(0.0, *ages) if ages else 0.0,
        top=tuple(sorted(backlogs, key=lambda one: (-one.requests, one.tenant_id))[:TOP]),
        is_cut=number > len(tenants),
    )


def _each(client: Any, commands: list[tuple[Any, ...]]) -> list[Any]:
    answers: list[Any] = []
    for start in range(0, len(commands), _CHUNK):
        pipe = client.pipeline(transaction=False)
        for command in commands[start : start + _CHUNK]:
            pipe.execute_command(*command)
        answers += pipe.execute()
    return answers
