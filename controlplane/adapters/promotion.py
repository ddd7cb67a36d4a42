"""Which version of an adapter is live: promote, roll back, and what becomes live by itself.

Every change is a `Promotion` row and an audit event in one transaction. Gateways see it within half
a second (`gateway.callers`); requests that run finish on the version they began with.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from django.db import transaction

from controlplane.adapters.models import Adapter, AdapterVersion, Promotion
from controlplane.audit.origin import current_origin
from controlplane.audit.services import record
from controlplane.errors import Conflict, InvalidRequest

MAX_REASON_CHARS = 500
#: A rollback looks at so many of the newest promotions for a version to go back to.
_MAX_STEPS_BACK = 1000

Cause = Promotion.Cause
#: These undo promotions until the version is on top again.
GOES_BACK = (Cause.ROLLED_BACK, Cause.RETIRED, Cause.DELETED)
Status = AdapterVersion.Status


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
    if adapter.live_version_id != version.pk:
        live_version_set(adapter, version, Cause.PROMOTED, reason)
    return adapter


@transaction.atomic
def adapter_roll_back(*, adapter: Adapter, reason: str = "") -> Adapter:
    """Make the version live that was so before the live one; a second call goes back further.

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
def promotion_policy_set(*, adapter: Adapter, policy: str) -> None:
    """Set what happens to versions that become ready from now on."""
    before = {"promotion_policy": adapter.promotion_policy}
    adapter.promotion_policy = Adapter.PromotionPolicy(policy)
    adapter.save(update_fields=["promotion_policy"])
    record("changed", adapter, before=before, after={"promotion_policy": policy})


def lock(adapter_id: uuid.UUID) -> Adapter:
    """Return the adapter; other changes of what is live wait for the end of the transaction."""
    rows = Adapter.objects.select_for_update(of=("self",)).select_related("live_version")
    return rows.get(pk=adapter_id)


def ready_apply(adapter: Adapter, version: AdapterVersion) -> None:
    """Make a version live that became ready, if none is, or if the adapter's policy says so.

    Not if a newer one is live: checks may end in another order than uploads.
    """
    live = adapter.live_version
    if live is None:
        live_version_set(adapter, version, Cause.FIRST)
    elif adapter.promotion_policy == Adapter.PromotionPolicy.IMMEDIATE:
        if live.number < version.number:
            live_version_set(adapter, version, Cause.POLICY)


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
    record("live_version_set", adapter, before=before, after=after | _given(reason))


def version_before(adapter: Adapter) -> AdapterVersion | None:
    """Return the version to which a rollback goes; None if there is none.

    Versions that are no longer ready are passed over.
    """
    newest = Promotion.objects.filter(adapter=adapter).order_by("-created_at", "-pk")
    live = adapter.live_version.number if adapter.live_version else None
    numbers = [number for number in live_stack(newest[:_MAX_STEPS_BACK][::-1]) if number != live]
    rows = AdapterVersion.objects.filter(adapter=adapter, number__in=numbers, status=Status.READY)
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
