"""Change an adapter's live version: promote, roll back, or by its policy.

Every change is a `Promotion` row and an audit event in one transaction. Gateways see it within half
a second (`inference.access`); requests that run finish on the version they began with.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Collection, Iterable
from typing import Any

from django.db import transaction

from controlplane.adapters.models import Adapter, AdapterVersion, Promotion, is_not_over
from controlplane.errors import Conflict, InvalidRequest
from controlplane.events.audit.origin import current_origin
from controlplane.events.audit.services import record
from controlplane.events.outbox.models import EventType
from controlplane.events.outbox.services import publish
from controlplane.infra.hooks import Hook
from controlplane.tenancy.model_scope import check_named

MAX_REASON_CHARS = 500
#: Number of the newest promotions among which a rollback looks for a version.
_MAX_STEPS_BACK = 1000

Cause = Promotion.Cause
#: These undo promotions until the version is on top again.
GOES_BACK = (Cause.ROLLED_BACK, Cause.RETIRED, Cause.DELETED)
Status = AdapterVersion.Status

#: Called once the version is live and the transaction has ended.
became_live = Hook[[AdapterVersion], None]()
#: Called with a version that nobody made live, in the transaction in which it became ready; the
#: adapter's policy is `gate`.
awaits_gate = Hook[[Adapter, AdapterVersion], None]()


@transaction.atomic
def adapter_version_promote(*, version: AdapterVersion, reason: str = "") -> Adapter:
    """Make a ready version live. If it is live already, nothing changes.

    Raises Conflict for a version that is not ready, InvalidRequest for a reason that is too long.
    """
    _check_reason(reason)
    adapter = lock(version.adapter_id)
    ready = AdapterVersion.objects.filter(pk=version.pk, status=Status.READY)
    if not ready.exists():
        raise Conflict(
            f"Version {version.number} is {version.status}: only a ready version can be live.",
            code="version_not_ready",
        )
    if not ready.filter(is_not_over()).exists():
        raise Conflict(
            f"Version {version.number} was shut down on {version.shutdown_date}: undeprecate it "
            "first.",
            code="version_not_ready",
        )
    if adapter.live_version_id != version.pk:
        live_version_set(adapter, version, Cause.PROMOTED, reason)
    return adapter


@transaction.atomic
def adapter_roll_back(*, adapter: Adapter, reason: str = "") -> Adapter:
    """Make the version live that was live before; a second call goes back further.

    Raises Conflict when no earlier one is ready, InvalidRequest for a reason that is too long.
    """
    _check_reason(reason)
    adapter = lock(adapter.pk)
    earlier = version_before(adapter)
    if earlier is None:
        raise Conflict(
            f"No earlier version of {adapter.name} was live and is still ready.",
            code="no_earlier_version",
        )
    live_version_set(adapter, earlier, Cause.ROLLED_BACK, reason)
    return adapter


@transaction.atomic
def promotion_policy_set(
    *, adapter: Adapter, policy: str | None = None, gate: dict[str, Any] | None = None
) -> None:
    """Set what happens to versions that become ready from now on; None: as it was.

    gate  of the policy `gate`, as `evaluations.gate_policy` checked it. Naming a suite there
          means this policy, in place of `hold`, unless `policy` says another one.
    """
    before = {"promotion_policy": adapter.promotion_policy, "gate": adapter.gate}
    hold, by_gate = Adapter.PromotionPolicy.HOLD, Adapter.PromotionPolicy.GATE
    if gate is not None:
        adapter.gate = gate
        if policy is None and gate.get("suite") and adapter.promotion_policy == hold:
            policy = by_gate
    if policy is not None:
        adapter.promotion_policy = Adapter.PromotionPolicy(policy)
    if adapter.promotion_policy == by_gate and not adapter.gate.get("suite"):
        raise InvalidRequest("The policy gate needs the suite in `gate`.", param="gate")
    adapter.save(update_fields=["promotion_policy", "gate"])
    after = {"promotion_policy": str(adapter.promotion_policy), "gate": adapter.gate}
    record("changed", adapter, before=before, after=after)


def lock(adapter_id: uuid.UUID) -> Adapter:
    """Return the adapter; other changes of what is live wait for the end of the transaction.

    Raises PermissionDenied for a key that may name a version of it, but not the adapter.
    """
    rows = Adapter.objects.select_for_update(of=("self",)).select_related("live_version")
    adapter = rows.get(pk=adapter_id)
    check_named(adapter.name, "name")
    return adapter


def ready_apply(adapter: Adapter, version: AdapterVersion) -> None:
    """Make a version live that became ready, if none is, or if the adapter's policy says so.

    Not if a newer one is live: checks may end in another order than uploads. Nor a training's
    checkpoint: only somebody who names it makes it live.
    """
    if version.source == AdapterVersion.Source.CHECKPOINT:
        return
    live = adapter.live_version
    if live is None:
        live_version_set(adapter, version, Cause.FIRST)
    elif live.number > version.number:
        pass
    elif adapter.promotion_policy == Adapter.PromotionPolicy.IMMEDIATE:
        live_version_set(adapter, version, Cause.POLICY)
    elif adapter.promotion_policy == Adapter.PromotionPolicy.GATE:
        awaits_gate(adapter, version)


def live_version_set(
    adapter: Adapter, version: AdapterVersion | None, cause: Cause, reason: str = ""
) -> None:
    """Set a locked adapter's live version, with its history. Call it last in a transaction."""
    previous, origin = adapter.live_version, current_origin()
    adapter.live_version = version
    adapter.save(update_fields=["live_version"])
    Promotion.objects.create(
        adapter=adapter,
        version=version,
        number=version.number if version else None,
        previous_number=previous.number if previous else None,
        cause=cause,
        reason=reason,
        actor_type=origin.actor_type,
        actor_name=origin.actor_name or origin.actor_id[:320],
    )
    after = {"live_version": version.number if version else None, "cause": cause.value}
    before = {"live_version": previous.number if previous else None}
    publish(
        EventType.VERSION_ROLLED_BACK if cause in GOES_BACK else EventType.VERSION_PROMOTED,
        adapter=adapter.name,
        version=after["live_version"],
        previous_version=before["live_version"],
        cause=cause.value,
        reason=reason,
    )
    record("live_version_set", adapter, before=before, after=after | _given(reason))
    if version is not None:
        transaction.on_commit(functools.partial(became_live, version), robust=True)


def version_before(
    adapter: Adapter, *, gone: Collection[AdapterVersion] = ()
) -> AdapterVersion | None:
    """Return the version to which a rollback goes; None if there is none.

    Versions that are no longer ready are passed over, and those that are about to go.
    """
    newest = Promotion.objects.filter(adapter=adapter).order_by("-created_at", "-pk")
    live = adapter.live_version.number if adapter.live_version else None
    passed = {live, *(version.number for version in gone)}
    stack = live_stack(newest[:_MAX_STEPS_BACK][::-1])
    numbers = [number for number in stack if number not in passed]
    rows = AdapterVersion.objects.filter(adapter=adapter, number__in=numbers, status=Status.READY)
    rows = rows.filter(is_not_over())
    ready = {version.number: version for version in rows}
    return next((ready[number] for number in reversed(numbers) if number in ready), None)


def live_stack(promotions: Iterable[Promotion]) -> list[int]:
    """Return the numbers of versions that were live and not rolled back, the newest last. Pure.

    promotions  of one adapter, oldest first
    """
    stack: list[int] = []
    for promotion in promotions:
        if promotion.cause in GOES_BACK:
            while stack and stack[-1] != promotion.number:
                stack.pop()
        elif promotion.number is not None:
            stack.append(promotion.number)
    return stack


def _check_reason(reason: str) -> None:
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidRequest(
            f"A reason can have at most {MAX_REASON_CHARS} characters.", param="reason"
        )


def _given(reason: str) -> dict[str, str]:
    return {"reason": reason} if reason else {}
