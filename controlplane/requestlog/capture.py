"""Capture: requests that a tenant stores to train on. Off until the tenant switches it on.

It is separate from the request log's content: kept for its own time, sampled, and only for chats
whose whole prompt and answer are known. Rows are encrypted with a key of their own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import Count, Sum

from contract.messages.protocol import FinishReason
from controlplane.errors import InvalidRequest
from controlplane.events.audit.services import record
from controlplane.infra.characters import can_be_written
from controlplane.infra.metrics import CAPTURED_REQUESTS
from controlplane.requestlog import sealing
from controlplane.requestlog.models import CapturedRequest, CapturePolicy
from controlplane.requestlog.services import Words
from controlplane.tenancy.scoping import all_tenants

MAX_DAYS = 365
#: Limits of a tenant's policy.
MAX_ROWS, MIN_BYTES, MAX_BYTES = 50_000, 1024**2, 256 * 1024**2
MAX_MODELS = 50
MAX_MODEL_CHARS = 200
#: Number of rows deleted by one statement.
_PIECE = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureRule:
    """Shares from 0 to 1: of each model's requests in `shares`, and of all others."""

    share: float
    shares: Mapping[str, float]

    def takes(self, request_id: str, model: str, store: bool | None) -> bool:
        """Return whether to keep a request, the same in each process; never with `store: false`."""
        if store is False:
            return False
        digest = hashlib.sha256(request_id.encode()).digest()
        return int.from_bytes(digest[:6]) < self.shares.get(model, self.share) * 2**48

    @classmethod
    def of(cls, policy: CapturePolicy) -> CaptureRule | None:
        """Return the policy's rule, or None when it keeps nothing."""
        is_on = policy.share > 0 or any(share > 0 for share in policy.shares.values())
        return cls(policy.share, policy.shares) if is_on else None


def capture_policy() -> CapturePolicy:
    """Return the policy of the tenant in scope; if it has none, the default one, unsaved."""
    return CapturePolicy.objects.first() or CapturePolicy()


@transaction.atomic
def capture_policy_set(
    *, share: float, shares: Mapping[str, float], days: int, max_rows: int, max_bytes: int
) -> CapturePolicy:
    """Set the policy of the tenant in scope; stored rows stay until they expire.

    Raises InvalidRequest that names the field.
    """
    _check_number("share", share, 0, 1)
    if len(shares) > MAX_MODELS:
        raise InvalidRequest(f"Name at most {MAX_MODELS} models.", param="shares")
    for name, value in shares.items():
        if not 0 < len(name) <= MAX_MODEL_CHARS or "\0" in name or not can_be_written(name):
            raise InvalidRequest("This must be the name of a model.", param="shares")
        _check_number(f"shares.{name}", value, 0, 1)
    _check_number("days", days, 1, MAX_DAYS)
    _check_number("max_rows", max_rows, 1, MAX_ROWS)
    _check_number("max_bytes", max_bytes, MIN_BYTES, MAX_BYTES)
    CapturePolicy.objects.bulk_create([CapturePolicy()], ignore_conflicts=True)
    policy = CapturePolicy.objects.select_for_update().get()
    before = _audit_fields(policy)
    policy.share, policy.shares = share, dict(shares)
    policy.days, policy.max_rows, policy.max_bytes = days, max_rows, max_bytes
    if not policy.wrapped_key and CaptureRule.of(policy) is not None:
        policy.wrapped_key = sealing.new_key()
    policy.save()
    if before != _audit_fields(policy):
        record("changed", policy, before=before, after=_audit_fields(policy))
    return policy


def _check_number(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidRequest(f"This must be from {least} to {most}.", param=name)


def _audit_fields(policy: CapturePolicy) -> dict[str, Any]:
    names = ("share", "days", "max_rows", "max_bytes")
    # A list: the trail refuses fields called `token` or `secret`, and models may have these names.
    shares = sorted(policy.shares.items())
    return {"shares": shares} | {name: getattr(policy, name) for name in names}


def rules_of_all() -> dict[uuid.UUID, CaptureRule]:
    """Return the rules of all tenants that keep anything."""
    with all_tenants(reason="a gateway serves all tenants"):
        policies = list(CapturePolicy.objects.all())
    rules = {policy.tenant_id: CaptureRule.of(policy) for policy in policies}
    return {tenant_id: rule for tenant_id, rule in rules.items() if rule is not None}


def captures_keep(found: Sequence[Words]) -> int:
    """Store the requests that their tenants want now, within bounds. -> their number

    Raises django.db.Error.
    """
    whole = [words for words in found if words.is_row and _is_whole(words)]
    if not whole:
        return 0
    with all_tenants(reason="the requests belong to many tenants"), transaction.atomic():
        policies = {
            policy.tenant_id: policy
            for policy in CapturePolicy.objects.filter(tenant_id__in={w.tenant_id for w in whole})
        }
        rows = [
            _row(words, policy)
            for words in whole
            if (policy := policies.get(words.tenant_id))
            and (rule := CaptureRule.of(policy))
            and rule.takes(words.request_id, words.model, words.store)
        ]
        CapturedRequest.objects.bulk_create(rows, ignore_conflicts=True)
        for tenant_id in {row.tenant_id for row in rows}:
            make_room(policies[tenant_id])
    CAPTURED_REQUESTS.inc(len(rows))
    return len(rows)


def _is_whole(words: Words) -> bool:
    """Return whether the answer and all stored parts are complete: others teach nothing."""
    is_said = words.finish_reason == FinishReason.STOP and any(words.outputs)
    return is_said and not words.is_truncated and "messages" in words.prompt


def _row(words: Words, policy: CapturePolicy) -> CapturedRequest:
    content = {
        "request_id": words.request_id,
        "messages": words.prompt["messages"],
        "tools": list(words.tools),
        "output": words.outputs[0],
    }
    sealed = sealing.seal(content, bytes(policy.wrapped_key))
    return CapturedRequest(
        tenant_id=words.tenant_id,
        request_id=words.request_id,
        model=words.model[:MAX_MODEL_CHARS],
        sealed=sealed,
        num_bytes=len(sealed),
    )


def make_room(policy: CapturePolicy) -> int:
    """Delete the oldest rows above the policy's bounds, those with feedback last. -> the number"""
    rows = CapturedRequest.objects.filter(tenant_id=policy.tenant_id)
    kept = rows.aggregate(num=Count("pk"), sum=Sum("num_bytes"))
    num_over, bytes_over = kept["num"] - policy.max_rows, (kept["sum"] or 0) - policy.max_bytes
    deleted = 0
    while num_over > 0 or bytes_over > 0:
        oldest = rows.order_by("is_rated", "created_at").values_list("pk", "num_bytes")[:_PIECE]
        keys = []
        for key, num_bytes in oldest:
            if num_over <= 0 and bytes_over <= 0:
                break
            keys.append(key)
            num_over, bytes_over = num_over - 1, bytes_over - num_bytes
        if not keys:
            break
        deleted += rows.filter(pk__in=keys).delete()[0]
    return deleted
