"""Delete expired log lines and content, a bounded number at a time.

Each step is its own transaction: a task that was killed continues where it stopped, and no lock is
held for long.
"""

from __future__ import annotations

import datetime as dt
import logging
import uuid
from typing import Any

from django.conf import settings
from django.db import Error as DatabaseError
from django.db import models
from django.db.models import Sum

from controlplane.requestlog.capture import make_room
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import (
    CapturedRequest,
    CapturePolicy,
    Feedback,
    LogPolicy,
    RefusalHour,
    RequestContent,
)
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant

log = logging.getLogger(__name__)

PIECE = 5000


def requests_forget(*, now: dt.datetime) -> dict[str, int]:
    """Delete every tenant's log lines and content above its limits of age and size.

    -> rows deleted, by kind
    """
    with all_tenants(reason="delete expired log lines of all tenants"):
        tenant_ids = list(Tenant.objects.values_list("pk", flat=True))
        policies = {policy.tenant_id: policy for policy in LogPolicy.objects.all()}
        captures = {policy.tenant_id: policy for policy in CapturePolicy.objects.all()}
    counts = dict.fromkeys(("requests", "contents", "refusals", "captured", "feedback"), 0)
    for tenant_id in tenant_ids:
        policy = policies.get(tenant_id) or LogPolicy(tenant_id=tenant_id)
        with tenant_scope(tenant_id):
            try:
                _forget_words(policy, now, counts)
                _forget_metadata(policy, now, counts)
                if tenant_id in captures:
                    _forget_captured(captures[tenant_id], now, counts)
            except DatabaseError:  # continue with the others
                log.exception("expired log lines were not deleted")
    log.info("deleted %s", counts)
    return counts


def _forget_metadata(policy: LogPolicy, now: dt.datetime, counts: dict[str, int]) -> None:
    oldest = now - dt.timedelta(days=policy.metadata_days)
    requests = InferenceRequest.objects.filter(accepted_at__lt=oldest)
    counts["requests"] += _delete(requests.order_by("accepted_at"))
    refusals = RefusalHour.objects.filter(starts_at__lt=oldest)
    counts["refusals"] += _delete(refusals.order_by("starts_at"))
    feedback = Feedback.objects.filter(created_at__lt=oldest)
    counts["feedback"] += _delete(feedback.order_by("created_at"))


def _forget_captured(policy: CapturePolicy, now: dt.datetime, counts: dict[str, int]) -> None:
    oldest = now - dt.timedelta(days=policy.days)
    rows = CapturedRequest.objects.filter(created_at__lt=oldest)
    counts["captured"] += _delete(rows.order_by("created_at")) + make_room(policy)


def _forget_words(policy: LogPolicy, now: dt.datetime, counts: dict[str, int]) -> None:
    contents = RequestContent.objects.order_by("created_at")
    if policy.content != LogPolicy.Content.OFF and policy.key_made_at is not None:
        # Content encrypted with an earlier key is unreadable.
        oldest = max(now - dt.timedelta(days=policy.content_days), policy.key_made_at)
        contents = contents.filter(created_at__lt=oldest)
    counts["contents"] += _delete(contents)
    counts["contents"] += _delete_above(settings.CONTENT_BYTES_PER_TENANT)


def _delete(rows: models.QuerySet[Any]) -> int:
    total = 0
    while keys := list(rows.values_list("pk", flat=True)[:PIECE]):
        total += _delete_keys(rows.model, keys)
    return total


def _delete_above(max_bytes: int) -> int:
    """Delete the tenant's oldest content until at most `max_bytes` are left."""
    total = 0
    excess = (RequestContent.objects.aggregate(sum=Sum("num_bytes"))["sum"] or 0) - max_bytes
    while excess > 0:
        sizes = RequestContent.objects.order_by("created_at").values_list("pk", "num_bytes")
        keys = []
        for key, num_bytes in sizes[:PIECE]:
            if excess <= 0:
                break
            keys.append(key)
            excess -= num_bytes
        if not keys:  # another process deletes as well
            break
        total += _delete_keys(RequestContent, keys)
    return total


def _delete_keys(model: Any, keys: list[uuid.UUID]) -> int:
    deleted: int = model.objects.filter(pk__in=keys).delete()[0]
    return deleted
