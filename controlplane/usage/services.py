"""Write usage: each terminal record of a worker becomes rows exactly once."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Sequence

from django.db import transaction

from contract.adapters.inspection import PROBE_ENDPOINT
from contract.messages.protocol import DoneRecord
from controlplane.infra.hooks import Hook
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenancy.scoping import all_tenants
from controlplane.usage.models import UsageRecord
from controlplane.usage.totals import usage_totals_add

#: Called with the records that are new, in the transaction that writes their rows. An error undoes
#: the rows, too.
records_settled = Hook[[Sequence[DoneRecord]], None]()

#: Largest distance of two records of one request.
_NEAR = dt.timedelta(days=1)


def usage_settle(records: Sequence[DoneRecord]) -> None:
    """Write a usage record and a log line for each request; existing ones stay unchanged.

    New records are added to the totals by hour and day. Probes of adapters are not their tenant's
    requests: they get neither.

    Writes all or nothing. Raises ValueError for a record that does not fit its row, django.db.Error
    for one that the database refuses (its tenant is deleted) or when the database is away.
    """
    records = [record for record in records if record.endpoint != PROBE_ENDPOINT]
    usage = [_usage_record(record) for record in records]
    log = [_inference_request(record) for record in records]
    with all_tenants(reason="the records belong to many tenants"), transaction.atomic():
        written = usage_records_create(usage)
        InferenceRequest.objects.bulk_create(log, ignore_conflicts=True)
        rows = zip(records, usage, strict=True)
        records_settled([record for record, row in rows if row.pk in written])


def usage_records_create(rows: Sequence[UsageRecord]) -> set[uuid.UUID]:
    """Write rows for requests without one, and add them to the totals. -> their ids."""
    if not rows:
        return set()
    moments = [row.occurred_at for row in rows]
    with transaction.atomic():
        # Search only the months of these rows, so that older ones cost nothing.
        near = UsageRecord.objects.filter(
            occurred_at__gte=min(moments) - _NEAR, occurred_at__lte=max(moments) + _NEAR
        )
        ids = [row.request_id for row in rows]
        known = set(near.filter(request_id__in=ids).values_list("request_id", flat=True))
        rows = [row for row in rows if row.request_id not in known]
        UsageRecord.objects.bulk_create(rows, ignore_conflicts=True)
        # A row that was ignored, because one exists for its request, is not found by its own key.
        written = near.filter(pk__in=[row.pk for row in rows])
        keys = set(written.values_list("pk", flat=True))
        usage_totals_add([row for row in rows if row.pk in keys])
    return keys


def _usage_record(record: DoneRecord) -> UsageRecord:
    return UsageRecord(
        tenant_id=uuid.UUID(record.tenant_id),
        request_id=record.request_id,
        api_key_id=_optional_uuid(record.api_key_id),
        model=record.model,
        base_model=record.base_model,
        adapter_version_id=_optional_uuid(record.adapter_version_id),
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        finish_reason=record.finish_reason,
        occurred_at=_moment(record.created_at + record.total_ms / 1000),
    )


def _inference_request(record: DoneRecord) -> InferenceRequest:
    return InferenceRequest(
        tenant_id=uuid.UUID(record.tenant_id),
        request_id=record.request_id,
        api_key_id=_optional_uuid(record.api_key_id),
        model=record.model,
        base_model=record.base_model,
        adapter_version_id=_optional_uuid(record.adapter_version_id),
        alias_revision_id=_optional_uuid(record.alias_revision_id),
        alias_target=record.alias_target or "",
        worker_id=record.worker_id,
        stream=record.stream,
        finish_reason=record.finish_reason,
        error_code=record.error_code or "",
        endpoint=record.endpoint,
        is_batch=record.is_batch,
        digests=list(record.digests),
        weights=list(record.weights),
        sampling=record.sampling,
        attempts=record.attempts,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        accepted_at=_moment(record.created_at),
        queue_ms=record.queue_ms,
        load_ms=record.load_ms,
        first_token_ms=record.first_token_ms,
        total_ms=record.total_ms,
        tier=record.tier or "",
        drafts=record.drafts,
    )


def _optional_uuid(text: str | None) -> uuid.UUID | None:
    return uuid.UUID(text) if text else None


def _moment(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, tz=dt.UTC)
