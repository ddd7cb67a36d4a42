"""Dead letters and quarantine: requests that ended workers, for operators to see and undo."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import time
import uuid
from typing import Any

from django.conf import settings
from django.db import DataError, IntegrityError, transaction
from django.utils import timezone
from redis.exceptions import ResponseError

from contract.messages import protocol
from contract.messages.protocol import GenerateJob
from contract.queue import fair_queue
from controlplane.aliases.watching import quarantined_canaries_fail
from controlplane.errors import Conflict, Unavailable
from controlplane.events.audit.services import record, record_named
from controlplane.infra.locks import lock_until_commit
from controlplane.infra.redis_client import redis_client
from controlplane.queue.admission import output_estimate, prompt_estimate
from controlplane.queue.models import DeadLetter, Quarantine
from controlplane.tenancy.scoping import all_tenants
from controlplane.usage.limits.admit import ADMIT, MAX_TENANT_WAITING, MAX_WAITING

log = logging.getLogger(__name__)

#: How long a request that was put back may wait.
REQUEUE_DEADLINE_S = 3600.0
GIVEN_UP = b"given up"
#: The namespace of the ids of requests that were put back. Arbitrary, but it must not change.
_REQUEUED = uuid.UUID("5f0d3c1e-8a44-4f0e-9b1b-6f5d0a7c2e91")
#: Held while quarantine changes in both Redis and the database: or a release between two steps of a
#: sync would be undone.
_QUARANTINE_LOCK = "quarantine"


def dead_letters_collect(client: Any, pool: str) -> int:
    """Move the pool's given-up requests into rows. -> how many were read.

    Their prompts stay nowhere else. Repeating it after a crash writes none twice. One that fits no
    row harms no other. Raises RedisError, or OperationalError while the database is away.
    """
    key = protocol.dead_letter_key(pool)
    try:
        client.xgroup_create(key, protocol.ACCOUNTANT_GROUP, id="0", mkstream=True)
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
    entries = []
    for after in ("0", ">"):
        reply = client.xreadgroup(protocol.ACCOUNTANT_GROUP, "rows", {key: after}, count=100)
        entries += [entry for _, found in reply for entry in found]
    rows = {entry_id: row for entry_id, fields in entries if (row := _row(fields or {}))}
    with all_tenants(reason="letters are of many tenants"):
        _write(list(rows.values()))
    if entries:
        client.xack(key, protocol.ACCOUNTANT_GROUP, *(entry_id for entry_id, _ in entries))
    if rows:
        client.xdel(key, *rows)
    return len(entries)


def _write(letters: list[DeadLetter]) -> None:
    try:
        DeadLetter.objects.bulk_create(letters, ignore_conflicts=True)
    except (DataError, IntegrityError) as error:
        if len(letters) > 1:
            for letter in letters:
                _write([letter])
        elif letters[0].job is not None and isinstance(error, DataError):
            letters[0].job = None  # the database cannot store the prompt
            _write(letters)
        else:
            log.error("%s is no dead letter: %r", letters[0].request_id, error)


def _row(fields: dict[bytes, bytes]) -> DeadLetter | None:
    """Return the letter; None for an entry that is no request, which stays in the stream."""
    if fields.get(b"reason") != GIVEN_UP:
        return None
    try:
        job = GenerateJob.decode(fields[protocol.PAYLOAD_FIELD])
        version_id = job.adapter_version_id
        return DeadLetter(
            tenant_id=uuid.UUID(job.tenant_id),
            request_id=job.request_id,
            model=job.model,
            adapter_version_id=uuid.UUID(version_id) if version_id else None,
            worker_id=fields.get(b"source", b"").decode(),
            reason=fields[b"reason"].decode(),
            job=job.to_dict(),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.error("a dead letter cannot be read: %r", error)
        return None


def dead_letter_prompts_forget(*, now: dt.datetime) -> int:
    """Drop the prompts of letters older than DEAD_LETTER_DAYS; the letters stay. -> how many."""
    oldest = now - dt.timedelta(days=settings.DEAD_LETTER_DAYS)
    with all_tenants(reason="prompts of every tenant are dropped"):
        kept = DeadLetter.objects.filter(created_at__lt=oldest, job__isnull=False)
        return kept.update(job=None)


def dead_letter_requeue(letter: DeadLetter) -> str:
    """Run a given-up request again, as a batch request of a new id. -> the id.

    Its usage is recorded; its answer goes to nobody, and its prompt is dropped from the letter.
    A letter's new id is always the same, so that the queue takes it once, also when whoever put it
    back died before the database knew.

    Raises Conflict when it was requeued before, its prompt is not kept any more or it does not fit
    the queue, Unavailable when Redis does not answer.
    """
    if letter.job is None and letter.requeued_at is None:
        raise Conflict("The prompt of this request is not kept any more.")
    request_id = f"req_{uuid.uuid5(_REQUEUED, str(letter.pk)).hex}"
    _claim(letter, request_id)
    now = time.time()
    fields = {
        **(letter.job or {}),
        "request_id": request_id,
        "gateway_id": "",
        "stream": False,
        "is_batch": True,
        "created_at": now,
        "deadline": now + REQUEUE_DEADLINE_S,
    }
    job = GenerateJob.from_dict(fields)
    pool = settings.POOL
    args = [
        *(pool, fair_queue.queue_key(pool, job.base_model), request_id, job.encode()),
        *(job.tenant_id, fair_queue.BATCH, ",".join(ref.digest for ref in job.adapters)),
        *(job.deadline, protocol.JOB_TTL_S, "", prompt_estimate(job), output_estimate(job)),
        *(output_estimate(job), 0, 60, MAX_WAITING, MAX_TENANT_WAITING, 0),
    ]
    try:
        with redis_client() as client:
            verdict = client.eval(ADMIT, 1, protocol.job_key(pool, request_id), *args)
    except Unavailable:
        _unclaim(letter)
        raise
    if verdict[0] != b"ok":
        _unclaim(letter)
        raise Conflict(f"The queue refuses it: {verdict[0].decode()}.")
    DeadLetter.objects.filter(pk=letter.pk).update(job=None)
    return request_id


@transaction.atomic
def _claim(letter: DeadLetter, request_id: str) -> None:
    # A letter that still has its prompt may have been claimed by a process that died then.
    waiting = DeadLetter.objects.filter(pk=letter.pk, job__isnull=False)
    if not waiting.update(requeued_at=timezone.now(), requeued_as=request_id):
        raise Conflict("This request was put back already.")
    record("requeued", letter, after={"requeued_as": request_id})


@transaction.atomic
def _unclaim(letter: DeadLetter) -> None:
    DeadLetter.objects.filter(pk=letter.pk).update(requeued_at=None, requeued_as="")
    record("requeue_refused", letter)


@transaction.atomic
def dead_letter_discard(letter: DeadLetter) -> bool:
    """Delete a letter and its prompt; the audit trail says that it was. -> whether it existed."""
    number, _ = DeadLetter.objects.filter(pk=letter.pk).delete()
    if number:
        before = {"request_id": letter.request_id, "model": letter.model, "reason": letter.reason}
        record("discarded", letter, before=before)
    return bool(number)


def quarantined() -> dict[str, dt.datetime]:
    """Return adapter digest -> since when it is not served. Raises Unavailable."""
    with redis_client() as client:
        found = client.hgetall(fair_queue.quarantine_key(settings.POOL))
    return {
        digest.decode(): dt.datetime.fromtimestamp(int(since), tz=dt.UTC)
        for digest, since in found.items()
    }


def quarantine_sync(client: Any, pool: str) -> None:
    """Copy Redis's quarantine to the rows, or the rows to Redis when it lost them.

    Raises RedisError or django.db.Error.
    """
    key = fair_queue.quarantine_key(pool)
    with transaction.atomic():
        lock_until_commit(_QUARANTINE_LOCK)
        said = {digest.decode(): int(since) for digest, since in client.hgetall(key).items()}
        rows = dict(Quarantine.objects.filter(pool=pool).values_list("digest", "since"))
        for digest, since in rows.items():
            if digest not in said:
                log.warning("Redis had lost the quarantine of %s", digest)
                client.hset(key, digest, int(since.timestamp()))
        for digest in said.keys() - rows.keys():
            log.warning("an adapter was quarantined", extra={"digest": digest, "pool": pool})
        Quarantine.objects.bulk_create(
            Quarantine(pool=pool, digest=digest, since=dt.datetime.fromtimestamp(since, tz=dt.UTC))
            for digest, since in said.items()
            if digest not in rows
        )
        if new := said.keys() - rows.keys():
            tell = functools.partial(quarantined_canaries_fail, new)
            transaction.on_commit(tell, robust=True)


def quarantine_release(digest: str) -> bool:
    """Serve an adapter again. -> whether it was quarantined. Raises Unavailable."""
    with transaction.atomic(), redis_client() as client:
        lock_until_commit(_QUARANTINE_LOCK)
        rows = Quarantine.objects.filter(pool=settings.POOL, digest=digest)
        since = rows.values_list("since", flat=True).first()
        rows.delete()
        key = fair_queue.quarantine_key(settings.POOL)
        is_known = bool(client.hexists(key, digest)) or since is not None
        if is_known:
            before = {"pool": settings.POOL, "since": since}
            record_named("released", "quarantine", digest, before=before)
            client.hdel(key, digest)  # last: the steps before can be undone
    return is_known
