"""The arguments of `contract/queue/admit.lua`, limits and budgets, and its answers.

The script decides. It checks everything before it changes anything, in one atomic step of Redis, so
two gateways cannot both admit a request where only one fits. The end of a request releases
what it reserved (`contract/queue/finish.lua`). Rates use GCRA: a limit of N a minute is a bucket of
N that refills evenly; the state is the time at which the bucket is full again.
"""

from __future__ import annotations

import dataclasses

from contract.queue import fair_queue, scripts

#: Largest number of waiting requests for one base model: bounds Redis's memory.
MAX_WAITING = 50_000
#: Largest number of a tenant's waiting requests; the tenant's own limits may be lower.
MAX_TENANT_WAITING = 10_000

ADMIT = scripts.load("admit")
CANCEL = scripts.load("cancel")
SEED = scripts.load("seed_budget")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits that apply together: of a tenant, of one of its keys, or of one of its models.

    None: no such limit. `id` names the policy's state in Redis.
    """

    id: str
    scope: str = "tenant"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_waiting: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPeriod:
    """Tokens that a tenant, or one of its keys, may use until `ends_at`."""

    id: str
    api_key_id: str | None
    period: str  # "day" or "month"
    starts_at: float  # Unix seconds
    ends_at: float
    hard_limit: int | None
    soft_limit: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """All limits of one caller's use of one model."""

    policies: tuple[Policy, ...] = ()
    budgets: tuple[BudgetPeriod, ...] = ()


NO_LIMITS = Limits()


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """The state of a bucket: its size, what is left, and the seconds until it is full again."""

    limit: int
    remaining: int
    reset_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Admitted:
    """The state of the tightest limits, for the response's headers."""

    requests: Rate | None = None
    tokens: Rate | None = None
    soft_budget: BudgetPeriod | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal by the policy, or for a budget reason the budget, with this `index` from 1."""

    reason: str
    index: int
    retry_after_s: float
    limit: int


def read_verdict(reply: list[bytes | int], limits: Limits) -> Admitted | Refusal:
    """Parse the script's answer."""
    reason = _text(reply[0])
    if reason != "ok":
        return Refusal(reason, int(reply[1]), float(reply[2]), int(float(reply[3])))
    if len(reply) == 1:  # the call was repeated after a lost reply
        return Admitted()
    values = [float(value) for value in reply[1:8]]
    soft = int(values[6])
    return Admitted(
        requests=_rate(values[0:3]),
        tokens=_rate(values[3:6]),
        soft_budget=limits.budgets[soft - 1] if soft else None,
    )


def _rate(values: list[float]) -> Rate | None:
    limit, remaining, reset_s = values
    return Rate(int(limit), int(remaining), reset_s) if limit else None


def _text(value: bytes | int) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def admit_args(limits: Limits, pool: str, tenant_id: str) -> list[str | int]:
    """Return the script's arguments, beginning with the number of policies."""
    args: list[str | int] = [len(limits.policies)]
    for policy in limits.policies:
        args += [
            fair_queue.limit_key(pool, tenant_id, policy.id),
            policy.requests_per_minute or 0,
            policy.tokens_per_minute or 0,
            policy.max_concurrent or 0,
            policy.max_waiting or 0,
        ]
    for budget in limits.budgets:
        args += [
            budget_state_key(pool, tenant_id, budget),
            _or_none(budget.hard_limit),
            _or_none(budget.soft_limit),
        ]
    return args


def _or_none(tokens: int | None) -> int:
    """Return a budget's limit for the script: 0 allows nothing, -1 means no limit."""
    return -1 if tokens is None else tokens


def budget_state_key(pool: str, tenant_id: str, budget: BudgetPeriod) -> str:
    return fair_queue.budget_key(pool, tenant_id, budget.id, str(int(budget.starts_at)))
