"""Count what the targets of an alias answered, in the transaction that settles the requests."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from contract.messages.protocol import DoneRecord, ErrorCode, FinishReason
from controlplane.aliases.models import AliasPart, AliasRevision, TargetCount
from controlplane.aliases.verdict import FIRST_TOKEN_UNIT_MS, TOKEN_UNIT_MS, Counts, bucket_of

Target = AliasPart.Target

#: Errors that say nothing of the target: the client's, the decoder's, an overload's.
_NOT_ITS_FAULT = frozenset(
    {
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ErrorCode.INVALID_PROMPT,
        ErrorCode.INVALID_RESPONSE_FORMAT,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.OVERLOADED,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.GRAMMAR_QUOTA,
        ErrorCode.GRAMMAR_FAILED,
    }
)
#: Least number of tokens from which the time of each is measured.
_MIN_TOKENS = 4


def counts_of_record(record: DoneRecord) -> Counts | None:
    """Return what one request counts for its target; None: nothing. Pure."""
    if record.finish_reason == FinishReason.CANCELLED or record.error_code in _NOT_ITS_FAULT:
        return None
    counts = Counts(requests=1, truncated=int(record.finish_reason == FinishReason.LENGTH))
    if record.obeys_schema is not None:
        counts.checked, counts.broken = 1, int(not record.obeys_schema)
    if record.finish_reason == FinishReason.ERROR:
        counts.errors = int(record.error_code != ErrorCode.ANSWER_INVALID)
    elif record.first_token_ms is not None and not record.is_batch:
        # Without the waits for a turn and for an adapter that others had evicted: both depend on
        # the pool, and a canary with few requests would wait more often.
        own_ms = record.first_token_ms - record.queue_ms - record.load_ms
        counts.first_token = {bucket_of(own_ms, FIRST_TOKEN_UNIT_MS): 1}
        if record.completion_tokens >= _MIN_TOKENS:
            rest_ms = record.total_ms - record.first_token_ms
            each_ms = rest_ms / (record.completion_tokens - 1)
            counts.token = {bucket_of(each_ms, TOKEN_UNIT_MS): 1}
    return counts


def records_count(records: Sequence[DoneRecord]) -> list[uuid.UUID]:
    """Add new records to the counts of the revisions with a canary that they were admitted under.

    Call it in the transaction that settles them, across tenants. Records of deleted aliases are
    passed over. -> the revisions whose canaries have more requests now
    """
    found: dict[tuple[uuid.UUID, str], Counts] = {}
    tenants: dict[uuid.UUID, uuid.UUID] = {}
    for record in records:
        if record.alias_revision_id is None or record.alias_target not in Target.values:
            continue
        counts = counts_of_record(record)
        if counts is not None:
            key = (uuid.UUID(record.alias_revision_id), record.alias_target)
            found[key] = found.get(key, Counts()) + counts
            tenants[key[0]] = uuid.UUID(record.tenant_id)
    held = _add(found, tenants) if found else set()
    return [key for key, target in found if key in held and target == Target.CANARY]


def counts_of(revision: AliasRevision) -> dict[str, Counts]:
    """Return what both targets of a revision answered."""
    rows = TargetCount.objects.filter(revision=revision)
    return {target: Counts() for target in Target.values} | {row.target: row.counts for row in rows}


def _add(
    found: dict[tuple[uuid.UUID, str], Counts], tenants: dict[uuid.UUID, uuid.UUID]
) -> set[uuid.UUID]:
    # The locks make other accountants wait, and deletions of the alias: a row that names a deleted
    # revision would undo the whole transaction. In a fixed order, so that nobody waits in a circle.
    revisions = AliasRevision.objects.filter(pk__in=tenants, canary_percent__gt=0)
    revisions = revisions.only("pk", "tenant_id").order_by("pk")
    revisions = revisions.select_for_update(of=("self",), no_key=True)
    held = {row.pk: row for row in revisions if row.tenant_id == tenants[row.pk]}
    rows = {
        (row.revision_id, row.target): row
        for row in TargetCount.objects.filter(revision_id__in=held)
    }
    for (revision_id, target), counts in found.items():
        if revision_id not in held:
            continue
        row = rows.get((revision_id, target))
        if row is None:
            revision = held[revision_id]
            row = TargetCount(tenant_id=revision.tenant_id, revision=revision, target=target)
        row.put(row.counts + counts)
        row.save()
    return set(held)
