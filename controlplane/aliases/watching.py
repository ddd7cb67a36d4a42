"""Roll back canaries that are worse than their primary, as soon as the counts say so.

The accountant looks after each batch of ended requests; a task of beat looks again, for an
accountant that died between its commit and its look. A rollback holds the number of the revision
that was judged: if somebody has changed the alias since, theirs stands.
"""

from __future__ import annotations

import datetime as dt
import functools
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from contract.messages.protocol import DoneRecord
from controlplane.aliases import counting, ramps, services
from controlplane.aliases.comparison import compare
from controlplane.aliases.guards import guard_read
from controlplane.aliases.models import AliasPart, AliasRevision, is_current
from controlplane.errors import Conflict, NotFound
from controlplane.infra.metrics import CANARY_ROLLBACKS
from controlplane.tenancy.scoping import all_tenants, tenant_scope

log = logging.getLogger(__name__)

QUARANTINED = "an adapter of the canary is quarantined: it ended the workers that ran it"
#: The age of the oldest counts that the task looks at.
_LATELY = dt.timedelta(minutes=2)


def records_note(records: Sequence[DoneRecord]) -> None:
    """Count new records, and look at their canaries after the commit."""
    revision_ids = counting.records_count(records)
    if revision_ids:
        # A failure there must not look as if the records could not be settled.
        look = functools.partial(canaries_watch, revision_ids)
        transaction.on_commit(look, robust=True)


def canaries_watch(revision_ids: Iterable[uuid.UUID]) -> None:
    """Roll back those of these revisions' canaries that are worse than their primary."""
    with all_tenants(reason="the revisions belong to many tenants"):
        rows = AliasRevision.objects.filter(
            is_current(), pk__in=list(revision_ids), canary_percent__gt=0
        )
        found = list(rows.select_related("alias").prefetch_related("parts"))
    for revision in found:
        with tenant_scope(revision.tenant_id):
            _try(functools.partial(_judge, revision))


def _try(roll_back: Callable[[], None]) -> None:
    try:
        roll_back()
    except (Conflict, NotFound) as error:  # somebody was faster
        log.info("a canary is not rolled back: %s", error.message)
    except Exception:  # continue with the others
        log.exception("a canary could not be judged")


def quarantined_canaries_fail(digests: Collection[str]) -> None:
    """Roll back the canaries with one of these adapters, which is quarantined.

    Their requests are refused before they are counted, so the counts would never say so.
    """
    of_digest = Q(parts__version__digest__in=digests)
    of_digest |= Q(parts__version=None, parts__adapter__live_version__digest__in=digests)
    with all_tenants(reason="adapters of many tenants may have these bytes"):
        rows = AliasRevision.objects.filter(
            Q(parts__target=AliasPart.Target.CANARY) & of_digest,
            is_current(),
            canary_percent__gt=0,
        )
        found = list(rows.select_related("alias").distinct())
    for revision in found:
        if guard_read(revision.guard).is_on:
            with tenant_scope(revision.tenant_id):
                _try(functools.partial(canary_fail, revision, QUARANTINED))


def canaries_watch_all(now: dt.datetime | None = None) -> None:
    """Look at the canaries with recent requests, and take the ramps' steps that are due."""
    now = now or timezone.now()
    with all_tenants(reason="find the canaries of all tenants"):
        rows = AliasRevision.objects.filter(
            is_current(), canary_percent__gt=0, counts__updated_at__gt=now - _LATELY
        )
        revision_ids = list(rows.values_list("pk", flat=True).distinct())
    canaries_watch(revision_ids)
    ramps.ramps_advance(now)


def _judge(revision: AliasRevision) -> None:
    found = compare(revision).problems
    if found:
        canary_fail(revision, "; ".join(found))


@transaction.atomic
def canary_fail(revision: AliasRevision, reason: str) -> None:
    """Give a canary no more requests; stop its ramp. Raises Conflict if the alias changed."""
    reason = reason[: services.MAX_REASON_CHARS]
    services.canary_fail(alias=revision.alias, reason=reason, if_revision=revision.number)
    ramps.ramp_stop(revision.alias, reason)
    transaction.on_commit(CANARY_ROLLBACKS.inc)
    log.warning(
        "a canary was rolled back: %s",
        reason,
        extra={"alias_id": str(revision.alias_id), "revision": revision.number},
    )
