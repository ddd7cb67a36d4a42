"""What is kept of requests: each tenant's choice, and the words of those it wants kept."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.utils import timezone

from controlplane.audit.services import record
from controlplane.errors import InvalidRequest, NotFound
from controlplane.requestlog import sealing
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import LogPolicy, RequestContent
from controlplane.tenancy.scoping import all_tenants

Content = LogPolicy.Content

MAX_CONTENT_DAYS, MAX_METADATA_DAYS = 365, 730


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What one request asked and was answered.

    store   what the request itself says about being kept; None: nothing
    prompt  as the job has it: {"messages": …}, {"text": …} or {"token_ids": …}
    """

    tenant_id: uuid.UUID
    request_id: str
    store: bool | None
    prompt: dict[str, Any]
    outputs: list[str]
    finish_reason: str
    is_truncated: bool


def wants(content: str, store: bool | None) -> bool:
    """Whether a request's words are kept: by the tenant's choice, unless the request says no."""
    if content == Content.ALL:
        return store is not False
    return content == Content.ON_REQUEST and store is True


def log_policy() -> LogPolicy:
    """The choice of the tenant in scope; where it made none, the default one, unsaved."""
    return LogPolicy.objects.first() or LogPolicy()


@transaction.atomic
def log_policy_set(*, content: str, content_days: int, metadata_days: int) -> LogPolicy:
    """Choose for the tenant in scope. Off makes what is stored unreadable at once.

    Raises InvalidRequest for days out of range.
    """
    _check_days("content_days", content_days, MAX_CONTENT_DAYS)
    _check_days("metadata_days", metadata_days, MAX_METADATA_DAYS)
    LogPolicy.objects.bulk_create([LogPolicy()], ignore_conflicts=True)
    policy = LogPolicy.objects.select_for_update().get()
    before = _said(policy)
    policy.content = Content(content)
    policy.content_days = content_days
    policy.metadata_days = metadata_days
    if policy.content == Content.OFF:
        policy.wrapped_key, policy.key_made_at = b"", None
    elif not policy.wrapped_key:
        policy.wrapped_key, policy.key_made_at = sealing.new_key(), timezone.now()
    policy.save()
    if before != _said(policy):
        record("changed", policy, before=before, after=_said(policy))
    return policy


def _said(policy: LogPolicy) -> dict[str, Any]:
    return {
        "content": str(policy.content),
        "content_days": policy.content_days,
        "metadata_days": policy.metadata_days,
    }


def _check_days(name: str, days: int, most: int) -> None:
    if not 1 <= days <= most:
        raise InvalidRequest(f"{name} is from 1 to {most}.", param=name)


def content_choices() -> dict[uuid.UUID, str]:
    """The tenants that keep words, and whose."""
    with all_tenants(reason="a gateway answers everybody"):
        kept = LogPolicy.objects.exclude(content=Content.OFF)
        return dict(kept.values_list("tenant_id", "content"))


def contents_keep(found: Sequence[Words]) -> int:
    """Store the words of those requests whose tenants want it now. -> how many.

    A request whose words are stored already keeps them. Raises django.db.Error.
    """
    with all_tenants(reason="words of many tenants are stored"), transaction.atomic():
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
    said = {
        "request_id": words.request_id,
        "prompt": words.prompt,
        "outputs": words.outputs,
        "finish_reason": words.finish_reason,
        "is_truncated": words.is_truncated,
    }
    sealed = sealing.seal(said, bytes(policy.wrapped_key))
    return RequestContent(
        tenant_id=words.tenant_id,
        request_id=words.request_id,
        sealed=sealed,
        num_bytes=len(sealed),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredWords:
    """The words of a request of the tenant in scope, as they were stored."""

    request_id: str
    stored_at: dt.datetime
    expires_at: dt.datetime
    prompt: dict[str, Any]
    outputs: list[str]
    finish_reason: str
    is_truncated: bool


def content_get(*, request_id: str) -> StoredWords:
    """Raises NotFound when they were not stored, or are not kept any more."""
    row, policy = _find_content(request_id), log_policy()
    expires_at = row.created_at + dt.timedelta(days=policy.content_days)
    if expires_at <= timezone.now() or policy.content == Content.OFF:
        raise _no_words()
    try:
        said = sealing.unseal(bytes(row.sealed), bytes(policy.wrapped_key))
    except sealing.Unreadable as error:
        raise _no_words() from error
    if said.pop("request_id") != request_id:
        raise _no_words()  # somebody moved it to another row
    return StoredWords(
        request_id=request_id, stored_at=row.created_at, expires_at=expires_at, **said
    )


@transaction.atomic
def content_delete(*, request_id: str) -> None:
    """Forget the words of one request; its log line stays. Raises NotFound."""
    row = _find_content(request_id)
    RequestContent.objects.filter(pk=row.pk).delete()
    record("deleted", row, before={"request_id": request_id})


def _find_content(request_id: str) -> RequestContent:
    row = None
    if "\0" not in request_id:
        row = RequestContent.objects.filter(request_id=request_id).first()
    if row is None:
        raise _no_words()
    return row


def _no_words() -> NotFound:
    return NotFound("Nothing is stored of the words of such a request.")


def request_get(*, request_id: str) -> InferenceRequest:
    """The log line of a request that has ended. Raises NotFound."""
    row = None
    if "\0" not in request_id:
        row = InferenceRequest.objects.filter(request_id=request_id).first()
    if row is None:
        raise NotFound("There is no such request, or it has not ended.")
    return row
