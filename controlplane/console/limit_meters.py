"""Read from Redis how much of each limit is used now, for display."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.utils import timezone

from contract.queue import fair_queue
from controlplane.errors import Unavailable
from controlplane.infra.redis_client import redis_client
from controlplane.usage.limits.admit import BudgetPeriod, budget_state_key
from controlplane.usage.limits.models import Budget, RateLimit
from controlplane.usage.limits.services import budget_period, tokens_spent

#: An empty bucket of N a minute is full again after this time.
_MINUTE_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Meter:
    """One limit and its use; `used` is None when Redis does not answer."""

    label: str
    used: int | None
    limit: int

    @property
    def share(self) -> float:
        """Return the used share, from 0 to 1."""
        return min(1.0, (self.used or 0) / self.limit) if self.limit else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class BudgetState:
    """A budget's period so far; `reserved` is for requests in flight."""

    period: BudgetPeriod
    spent: int
    reserved: int


def meters(rows: Sequence[RateLimit]) -> dict[Any, list[Meter]]:
    """Return by row id the limits and their use."""
    states = _ask([_rate_commands(row) for row in rows])
    return {
        row.pk: _meters_of(row, states[number] if states else None)
        for number, row in enumerate(rows)
    }


def budget_states(rows: Sequence[Budget]) -> dict[Any, BudgetState]:
    """Return the states by row id; if Redis does not have one, from the usage totals."""
    now = timezone.now()
    periods = {row.pk: budget_period(row, now) for row in rows}
    keys = {
        row.pk: budget_state_key(settings.POOL, str(row.tenant_id), periods[row.pk]) for row in rows
    }
    states = _ask([[("hmget", keys[row.pk], "spent", "reserved")] for row in rows])
    found = {}
    for number, row in enumerate(rows):
        spent, reserved = states[number][0] if states else (None, None)
        if spent is None:
            spent = tokens_spent(str(row.tenant_id), periods[row.pk])
        found[row.pk] = BudgetState(periods[row.pk], int(spent), int(reserved or 0))
    return found


def _rate_commands(row: RateLimit) -> list[tuple[Any, ...]]:
    key = fair_queue.limit_key(settings.POOL, str(row.tenant_id), row.id.hex)
    now = time.time()
    return [
        ("hmget", key, "r", "t"),
        ("zcount", f"{key}:run", now, "+inf"),
        ("zcount", key + fair_queue.WAITING, now, "+inf"),
    ]


def _ask(groups: list[list[tuple[Any, ...]]]) -> list[list[Any]] | None:
    """Run all commands in one round trip. -> their grouped answers; None without Redis."""
    if not groups:
        return []
    try:
        with redis_client() as client:
            pipe = client.pipeline(transaction=False)
            for group in groups:
                for name, *args in group:
                    getattr(pipe, name)(*args)
            answers = iter(pipe.execute())
    except Unavailable:
        return None
    return [[next(answers) for _ in group] for group in groups]


def _meters_of(row: RateLimit, state: list[Any] | None) -> list[Meter]:
    (requests, tokens), running, waiting = state or ((None, None), None, None)
    is_known = state is not None
    found = [
        (row.requests_per_minute, "requests a minute", _taken(requests, row.requests_per_minute)),
        (row.tokens_per_minute, "tokens a minute", _taken(tokens, row.tokens_per_minute)),
        (row.max_concurrent, "at a time", running),
        (row.max_waiting, "waiting", waiting),
    ]
    return [
        Meter(label, used if is_known else None, limit)
        for limit, label, used in found
        if limit is not None
    ]


def _taken(full_at: bytes | None, limit: int | None) -> int:
    """Return how much is taken of a bucket that is full again at `full_at`."""
    if full_at is None or limit is None:
        return 0
    return round(max(0.0, float(full_at) - time.time()) / _MINUTE_S * limit)
