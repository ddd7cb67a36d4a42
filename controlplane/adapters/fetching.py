"""Fetch the files of imported versions into their staging areas; then their check is as usual.

One import runs at a time, with a lease in its row; the tenant that was served longest ago is next.
A process that is killed leaves its lease: the sweep begins the import again. Sizes are compared
with the limits and the quota after the answer's header, before the file's bytes. Neither an address
nor a token is logged, or told in a reason.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import time
from collections.abc import Iterator

from django.db import transaction
from django.db.models import F, Min, Q, QuerySet
from django.utils import timezone

from controlplane.adapters import ingest, orphaned_objects
from controlplane.adapters.import_sources import CONFIG, TENSORS, Source, TryAgain
from controlplane.adapters.models import AdapterVersion, VersionImport
from controlplane.adapters.rejection import Rejected
from controlplane.adapters.uploads import FILES
from controlplane.errors import InvalidRequest
from controlplane.events.audit.services import record
from controlplane.infra import storage
from controlplane.infra.locks import lock_until_commit
from controlplane.infra.metrics import ADAPTER_IMPORTS
from controlplane.infra.outages import STORE_OUTAGE
from controlplane.infra.outbound.outbound import Answer
from controlplane.tenancy.row_lease import LeaseLost, RowLease
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.usage.limits import quotas, turns
from controlplane.usage.limits.models import Turn

log = logging.getLogger(__name__)

#: Others of the worker's processes stay free for checks.
MAX_AT_ONCE = 1
MAX_ATTEMPTS = 3
RETRY_AFTER = dt.timedelta(seconds=10)
#: Longer than a call's header may take, and a pause in its body.
_LEASE = dt.timedelta(seconds=90)
_RENEW_S = 5.0
_INTERRUPTED = "the fetching of the files was interrupted too often: import again"

Status = AdapterVersion.Status


class _Lease(RowLease[VersionImport]):
    def rows(self, *statuses: str) -> QuerySet[VersionImport]:
        return VersionImport.objects.filter(pk=self.row_id, fence=self.fence)

    def renew(self) -> None:
        """Extend the lease. Raises LeaseLost."""
        if not self.extend(self.rows(), _LEASE):
            raise LeaseLost

    def lock(self) -> None:
        """Hold the row until the transaction ends. Raises LeaseLost."""
        if not self.rows().select_for_update().exists():
            raise LeaseLost


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """The end of one attempt at an import; `result` is the metric's label."""

    version: AdapterVersion
    result: str

    @property
    def is_fetched(self) -> bool:
        return self.result == "fetched"


def next_in_s() -> float | None:
    """Return the seconds until the next free import may begin; None: there is none."""
    with all_tenants(reason="find imports of all tenants"):
        rows = _free().filter(tenant__status=Tenant.Status.ACTIVE)
        first = rows.aggregate(first=Min("next_attempt_at"))["first"]
    return None if first is None else max(0.0, (first - timezone.now()).total_seconds())


def import_next() -> Done | None:
    """Do the next import, of all tenants; None: none may begin now.

    Raises STORE_OUTAGE; then it is tried again later.
    """
    job = _claim()
    if job is None:
        return None
    with tenant_scope(job.tenant_id):
        rows = AdapterVersion.objects.select_related("adapter")
        version = rows.filter(pk=job.version_id, status=Status.UPLOADING).first()
        if version is None:  # decided or deleted just now
            VersionImport.objects.filter(pk=job.pk).delete()
            return None
        result = _execute(version, job)
        ADAPTER_IMPORTS.labels(result).inc()
        extra = {"version_id": str(version.pk), "attempt": job.attempts, "result": result}
        log.info("adapter import", extra=extra)
        return Done(version, result)


def _free() -> QuerySet[VersionImport]:
    return VersionImport.objects.filter(Q(lease_until=None) | Q(lease_until__lte=timezone.now()))


@transaction.atomic
def _claim() -> VersionImport | None:
    lock_until_commit("adapter imports")
    with all_tenants(reason="the next import is chosen among all tenants"):
        running = VersionImport.objects.filter(lease_until__gt=timezone.now())
        if running.count() >= MAX_AT_ONCE:
            return None
        job = turns.next_of(
            Turn.Kind.ADAPTER_IMPORT, _free().filter(next_attempt_at__lte=timezone.now())
        )
    if job is None:
        return None
    with tenant_scope(job.tenant_id):
        rows = VersionImport.objects.filter(pk=job.pk, fence=job.fence)
        if not _Lease.take(rows, _LEASE, attempts=F("attempts") + 1):
            return None
        turns.taken(Turn.Kind.ADAPTER_IMPORT)
        return rows.model.objects.get(pk=job.pk)


def _execute(version: AdapterVersion, job: VersionImport) -> str:
    """Fetch the files, or reject the version. -> the metric's label."""
    lease = _Lease(job)
    try:
        if job.attempts > MAX_ATTEMPTS:
            raise Rejected.because("", _INTERRUPTED)
        _fetch(version, lease, Source.unseal(version.origin, job.sealed))
        _finish(version, lease)
    except LeaseLost:
        if not AdapterVersion.objects.filter(pk=version.pk, status=Status.UPLOADING).exists():
            orphaned_objects.staging_clear(version)
        return "lost"
    except Rejected as rejected:
        return "rejected" if ingest.version_drop(version, rejected) else "lost"
    except TryAgain as failure:
        if job.attempts >= MAX_ATTEMPTS:
            return "rejected" if ingest.version_drop(version, failure.rejected) else "lost"
        lease.rows().update(lease_until=None, next_attempt_at=timezone.now() + RETRY_AFTER)
        return "again"
    except STORE_OUTAGE:
        # The import is not at fault, so the attempt does not count. Without the database the lease
        later = timezone.now() + RETRY_AFTER
        lease.rows().update(lease_until=None, next_attempt_at=later, attempts=F("attempts") - 1)
        raise
    return "fetched"


def _fetch(version: AdapterVersion, lease: _Lease, source: Source) -> None:
    """Put both files into the staging area.

    Raises Rejected, TryAgain, LeaseLost, storage.STORAGE_ERRORS.
    """
    storage.abort_parts(version.staging_prefix)  # left by a lost attempt
    source = source.pinned()
    lease.renew()
    with source.opened(CONFIG, max_bytes=FILES[CONFIG] + 1) as answer:
        stated = _stated(answer, CONFIG)
        config = b"".join(_bounded(answer, CONFIG))
        if stated not in (None, len(config)):
            raise TryAgain(CONFIG, "it could not be fetched: the answer ended too early")
        _check_length(CONFIG, len(config))
    lease.renew()
    with source.opened(TENSORS, max_bytes=FILES[TENSORS] + 1) as answer:
        num_bytes = _stated(answer, TENSORS)
        if num_bytes is None:
            raise Rejected.because(
                TENSORS, "its address states no length: serve it with Content-Length"
            )
        _note(version, lease, source, len(config), num_bytes)
        storage.put_bytes(version.staged_config_key, config)
        _stream(version, lease, answer, num_bytes)


def _stated(answer: Answer, file: str) -> int | None:
    """Return the length that the answer states. Raises Rejected for one that is not allowed."""
    text = answer.headers.get("Content-Length", "")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        return None
    _check_length(file, int(text))
    return int(text)


def _check_length(file: str, num_bytes: int) -> None:
    if num_bytes > FILES[file]:
        raise Rejected.because(file, f"it is longer than {FILES[file]} bytes")
    if num_bytes == 0:
        raise Rejected.because(file, "it is empty")


def _bounded(answer: Answer, file: str) -> Iterator[bytes]:
    received = 0
    for piece in answer.pieces():
        received += len(piece)
        if received > FILES[file]:
            _check_length(file, received)
        yield piece


@transaction.atomic
def _note(
    version: AdapterVersion, lease: _Lease, source: Source, config_bytes: int, tensors_bytes: int
) -> None:
    """Write sizes and commit into the version's row. Raises Rejected if the quota is full."""
    lease.lock()
    counted = version.num_bytes + version.config_num_bytes  # in an earlier attempt
    try:
        quotas.check("storage_bytes", config_bytes + tensors_bytes - counted)
    except InvalidRequest as error:
        raise Rejected.because("", error.message) from error
    version.config_num_bytes, version.num_bytes = config_bytes, tensors_bytes
    version.origin = dict(source.origin)
    version.save(update_fields=["config_num_bytes", "num_bytes", "origin"])


def _stream(version: AdapterVersion, lease: _Lease, answer: Answer, num_bytes: int) -> None:
    writer = storage.ObjectWriter(version.staged_tensors_key)
    received, renewed_at = 0, time.monotonic()
    try:
        for piece in answer.pieces():
            received += len(piece)
            writer.write(piece)
            if time.monotonic() - renewed_at > _RENEW_S:
                lease.renew()
                renewed_at = time.monotonic()
        if received != num_bytes:
            raise TryAgain(TENSORS, "it could not be fetched: the answer ended too early")
        lease.renew()
        writer.finish()
    except BaseException:
        writer.abort()
        raise


@transaction.atomic
def _finish(version: AdapterVersion, lease: _Lease) -> None:
    """Hand the files over to the check. Raises LeaseLost."""
    lease.lock()
    if not version.move(Status.UPLOADING, Status.UPLOADED):
        raise LeaseLost
    lease.rows().delete()
    record("uploaded", version, after={"origin": version.origin})
