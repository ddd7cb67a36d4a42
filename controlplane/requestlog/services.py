"""Each tenant's policy for the log, and the content of requests."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.utils import timezone

from controlplane.errors import InvalidRequest, NotFound, require
from controlplane.events.audit.services import record
from controlplane.requestlog import sealing
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import LogPolicy, RequestContent
from controlplane.tenancy.model_scope import current_bounds
from controlplane.tenancy.scoping import all_tenants

Content = LogPolicy.Content

MAX_CONTENT_DAYS, MAX_METADATA_DAYS = 365, 730


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Prompt and answers of one request.

    store   the request's own `store`; None if it has none
    prompt  as in the job: {"messages": …}, {"text": …} or {"token_ids": …}
    model   as the request named it
    tools   of a chat
    is_row  whether it is a chat with one answer, of a client: a row to train on
    """

    tenant_id: uuid.UUID
    request_id: str
    store: bool | None
    prompt: dict[str, Any]
    outputs: list[str]
    finish_reason: str
    is_truncated: bool
    model: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    is_row: bool = False


def wants(content: str, store: bool | None) -> bool:
    """Return whether to store content by the tenant's policy and the request's own `store`."""
    if content == Content.ALL:
        return store is not False
    return content == Content.ON_REQUEST and store is True


def log_policy() -> LogPolicy:
    """Return the policy of the tenant in scope; if it has none, the default one, unsaved."""
    return LogPolicy.objects.first() or LogPolicy()


@transaction.atomic
def log_policy_set(*, content: str, content_days: int, metadata_days: int) -> LogPolicy:
    """Set the policy of the tenant in scope. "off" makes stored content unreadable at once.

    Raises InvalidRequest for days out of range.
    """
    _check_days("content_days", content_days, MAX_CONTENT_DAYS)
    _check_days("metadata_days", metadata_days, MAX_METADATA_DAYS)
    LogPolicy.objects.bulk_create([LogPolicy()], ignore_conflicts=True)
    policy = LogPolicy.objects.select_for_update().get()
    before = _audit_fields(policy)
    policy.content = Content(content)
    policy.content_days = content_days
    policy.metadata_days = metadata_days
    if policy.content == Content.OFF:
        policy.wrapped_key, policy.key_made_at = b"", None
    elif not policy.wrapped_key:
        policy.wrapped_key, policy.key_made_at = sealing.new_key(), timezone.now()
    policy.save()
    if before != _audit_fields(policy):
        record("changed", policy, before=before, after=_audit_fields(policy))
    return policy


def _audit_fields(policy: LogPolicy) -> dict[str, Any]:
    return {
        "content": str(policy.content),
        "content_days": policy.content_days,
        "metadata_days": policy.metadata_days,
    }


def _check_days(name: str, days: int, most: int) -> None:
    if not 1 <= days <= most:
        raise InvalidRequest(f"{name} must be from 1 to {most}.", param=name)


def content_choices() -> dict[uuid.UUID, str]:
    """Return the policies of all tenants that store content."""
    with all_tenants(reason="a gateway serves all tenants"):
        kept = LogPolicy.objects.exclude(content=Content.OFF)
        return dict(kept.values_list("tenant_id", "content"))


def contents_keep(found: Sequence[Words]) -> int:
    """Store the content of requests whose tenants want that now. -> their number.

    Content that is already stored stays. Raises django.db.Error.
    """
    with all_tenants(reason="the content belongs to many tenants"), transaction.atomic():
        policies = {
            policy.tenant_id: policy
            for policy in LogPolicy.objects.filter(tenant_id__in={w.tenant_id for w in found})
        }
        rows = [
            _row(words, policy)
            for words in found
            if (policy := policies.get(words.tenant_id)) and wants(policy.content, words.store)
        ]
        RequestContent.objects.bulk_create(rows, ignore_conflicts=True)
    return len(rows)


def _row(words: Words, policy: LogPolicy) -> RequestContent:
    content = {
        "request_id": words.request_id,
        "prompt": words.prompt,
        "outputs": words.outputs,
        "finish_reason": words.finish_reason,
        "is_truncated": words.is_truncated,
    }
    sealed = sealing.seal(content, bytes(policy.wrapped_key))
    return RequestContent(
        tenant_id=words.tenant_id,
        request_id=words.request_id,
        sealed=sealed,
        num_bytes=len(sealed),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredWords:
    """The stored content of a request of the tenant in scope."""

    request_id: str
    stored_at: dt.datetime
    expires_at: dt.datetime
    prompt: dict[str, Any]
    outputs: list[str]
    finish_reason: str
    is_truncated: bool


def content_get(*, request_id: str) -> StoredWords:
    """Return a request's content. Raises NotFound when it was not stored, or has expired."""
    row, policy = _find_content(request_id), log_policy()
    expires_at = row.created_at + dt.timedelta(days=policy.content_days)
    if expires_at <= timezone.now() or policy.content == Content.OFF:
        raise _no_words()
    try:
        content = sealing.unseal(bytes(row.sealed), bytes(policy.wrapped_key))
    except sealing.Unreadable as error:
        raise _no_words() from error
    if content.pop("request_id") != request_id:
        raise _no_words()  # it was moved to another row
    return StoredWords(
        request_id=request_id, stored_at=row.created_at, expires_at=expires_at, **content
    )


@transaction.atomic
def content_delete(*, request_id: str) -> None:
    """Delete the content of one request; its log line stays. Raises NotFound."""
    row = _find_content(request_id)
    RequestContent.objects.filter(pk=row.pk).delete()
    record("deleted", row, before={"request_id": request_id})


def _find_content(request_id: str) -> RequestContent:
    row = None
    if "\0" not in request_id and _is_allowed(request_id):
        row = RequestContent.objects.filter(request_id=request_id).first()
    if row is None:
        raise _no_words()
    return row


def _is_allowed(request_id: str) -> bool:
    """Return whether the caller may name a request's model, which its log line has."""
    lines = InferenceRequest.objects.allowed()
    return current_bounds() is None or lines.filter(request_id=request_id).exists()


def _no_words() -> NotFound:
    return NotFound("No content is stored for such a request.")


def request_get(*, request_id: str) -> InferenceRequest:
    """Return the log line of a request that has ended. Raises NotFound."""
    row = None
    if "\0" not in request_id:
        row = InferenceRequest.objects.allowed().filter(request_id=request_id).first()
    return require(row, "There is no such request, or it has not ended.")
