"""Pull rows from datasets' sources: new ones become a version.

New objects are appended, and so is text behind the old end of an object that was pulled already. If
an object changed otherwise, all are pulled again and replace the rows. Missing objects change
nothing, and a pull that finds nothing new makes no version.

A source is pulled by one process at a time, with a lease in its row. A process that is killed
leaves its lease, and its pull is done again.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.db.models import Case, DateTimeField, F, Q, QuerySet, Value, When
from django.utils import timezone

from contract.training.chat_rows import MAX_ROWS
from controlplane.errors import ApiError, InvalidRequest, PayloadTooLarge
from controlplane.events.audit.services import recorded_at_end
from controlplane.infra import storage
from controlplane.infra.locks import lock_until_commit
from controlplane.infra.metrics import DATASET_PULLS
from controlplane.infra.outages import STORE_OUTAGE
from controlplane.infra.temp_folders import scratch_folder
from controlplane.tenancy.row_lease import LeaseLost, RowLease
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.training.datasets import (
    captured_rows,
    contents,
    pull_sources,
    row_check,
    sources,
    versions,
)
from controlplane.training.datasets.contents import Rows
from controlplane.training.datasets.pull_sources import Place, PullFailed, Remote
from controlplane.training.models import Dataset, DatasetPull, DatasetSource, dataset_key

log = logging.getLogger(__name__)

#: Pulls at a time in all processes: beside an adapter's import, one of three stays free.
MAX_AT_ONCE = 1
#: Number of a source's newest pulls that are kept.
MAX_PULLS = 50
#: Failed or interrupted pulls in a row after which the next one is the cron line's.
MAX_FAILURES = 3
_RETRY_AFTER = dt.timedelta(minutes=1)
#: Longer than a call's header may take, a pause in its body, and a check of an object's rows.
_LEASE = dt.timedelta(minutes=10)
_RENEW_S = 30.0
_PIECE_BYTES = 1 << 20
_MAX_ERROR_CHARS = 2000

Status = DatasetPull.Status


class _Lease(RowLease[DatasetSource]):
    def rows(self, *statuses: str) -> QuerySet[DatasetSource]:
        return DatasetSource.objects.filter(pk=self.row_id, fence=self.fence)

    def renew(self) -> None:
        """Extend the lease. Raises LeaseLost."""
        if not self.extend(self.rows(), _LEASE):
            raise LeaseLost


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """An object as pulled."""

    name: str
    tag: str
    sha256: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _News:
    """The findings of a pull: a file of rows, or none; and all present objects.

    appends  False: the rows replace those of before
    """

    path: Path
    num_rows: int
    appends: bool
    seen: list[_Seen]


def pulls_due() -> bool:
    """Return whether a source of any tenant is due and no process pulls it."""
    with all_tenants(reason="find sources of all tenants that are due"):
        return _due().exists()


def pull_next() -> bool:
    """Do a pull that is due, of any one tenant. -> False if none may begin now."""
    source = _claim()
    if source is None:
        return False
    with tenant_scope(source.tenant_id):
        pull = DatasetPull.objects.create(source=source)
        status = _execute(source, pull)
    DATASET_PULLS.labels(status).inc()
    log.info("a dataset was pulled", extra={"source_id": str(source.pk), "status": status})
    return True


def _due() -> QuerySet[DatasetSource]:
    now = timezone.now()
    is_free = Q(lease_until=None) | Q(lease_until__lte=now)
    return DatasetSource.objects.filter(
        is_free, next_pull_at__lte=now, tenant__status=Tenant.Status.ACTIVE
    )


@transaction.atomic
def _claim() -> DatasetSource | None:
    lock_until_commit("dataset pulls")
    with all_tenants(reason="the next pull is chosen among all tenants"):
        if DatasetSource.objects.filter(lease_until__gt=timezone.now()).count() >= MAX_AT_ONCE:
            return None
        tenants = list(_due().order_by("tenant_id").values_list("tenant_id", flat=True).distinct())
    if not tenants:
        return None
    with tenant_scope(random.choice(tenants)):  # so that one tenant's many delay no other
        due = _due().order_by("next_pull_at").first()
        if due is None or not _Lease.take(_due().filter(pk=due.pk), _LEASE):
            return None
        return DatasetSource.objects.get(pk=due.pk)


def _execute(source: DatasetSource, pull: DatasetPull) -> str:
    """Pull, and note the result. -> the metric's label."""
    lease = _Lease(source)
    lost = source.pulls.filter(status=Status.RUNNING).exclude(pk=pull.pk)
    lost.update(status=Status.FAILED, error="It was interrupted.", finished_at=timezone.now())
    try:
        if _failures_in_a_row(source) >= MAX_FAILURES and _was_interrupted(source):
            raise PullFailed("It was interrupted too often: ask for a pull later.")
        _pull(source, pull, lease)
    except LeaseLost:  # replaced by another process, or deleted with its source
        return "lost"
    except PullFailed as error:
        return _fail(source, pull, lease, str(error), is_final=error.is_final)
    except ApiError as error:
        return _fail(source, pull, lease, error.message, is_final=True)
    except STORE_OUTAGE as error:
        log.warning("a pull failed: %r", error)
        return _fail(source, pull, lease, "The platform's store did not answer.", is_final=False)
    except Exception:
        log.exception("a pull failed", extra={"source_id": str(source.pk)})
        return _fail(
            source,
            pull,
            lease,
            "The server failed on this pull: send the operator the dataset's name.",
            is_final=True,
        )
    return pull.status


def _failures_in_a_row(source: DatasetSource) -> int:
    ended = source.pulls.exclude(status=Status.RUNNING).order_by("-created_at")
    number = 0
    for status in ended.values_list("status", flat=True)[:MAX_FAILURES]:
        if status != Status.FAILED:
            break
        number += 1
    return number


def _was_interrupted(source: DatasetSource) -> bool:
    ended = source.pulls.exclude(status=Status.RUNNING).order_by("-created_at")
    errors = ended.values_list("error", flat=True)[:MAX_FAILURES]
    return all(error == "It was interrupted." for error in errors)


def _fail(
    source: DatasetSource, pull: DatasetPull, lease: _Lease, why: str, *, is_final: bool
) -> str:
    pull.status, pull.error = Status.FAILED, why[:_MAX_ERROR_CHARS]
    is_over = is_final or _failures_in_a_row(source) + 1 >= MAX_FAILURES
    try:
        _end(source, pull, lease, retry_at=None if is_over else timezone.now() + _RETRY_AFTER)
    except LeaseLost:
        return "lost"
    return pull.status


@transaction.atomic
def _end(
    source: DatasetSource,
    pull: DatasetPull,
    lease: _Lease,
    *,
    retry_at: dt.datetime | None = None,
) -> None:
    """Note the pull's end, and the time of the next one. Raises LeaseLost."""
    try:
        slot = sources.next_slot(source.cron, source.timezone)
    except InvalidRequest:  # the time zone database has changed since
        slot = None
    at = min((moment for moment in (slot, retry_at) if moment), default=None)
    held = lease.rows().filter(lease_until__gt=timezone.now())
    # A request for a pull in between gets one that begins after the request.
    is_as_it_was = When(next_pull_at=source.next_pull_at, then=Value(at, DateTimeField()))
    next_at = Case(is_as_it_was, default=F("next_pull_at"))
    if not held.update(lease_until=None, next_pull_at=next_at, seen=source.seen):
        raise LeaseLost
    pull.finished_at = timezone.now()
    pull.save()
    newest = source.pulls.order_by("-created_at").values("pk")[:MAX_PULLS]
    source.pulls.exclude(pk__in=list(newest.values_list("pk", flat=True))).delete()


def _pull(source: DatasetSource, pull: DatasetPull, lease: _Lease) -> None:
    """Pull the source once. Raises PullFailed, LeaseLost, ApiError, STORE_OUTAGE."""
    if source.kind == DatasetSource.Kind.CAPTURED:
        _pull_captured(source, pull, lease)
        return
    place = pull_sources.unsealed(source.kind, source.place, source.sealed)
    with scratch_folder("pull-") as folder:
        news = _Reading(source, place, lease, folder).news()
        if news is None:
            pull.status = Status.UNCHANGED
            _end(source, pull, lease)
            return
        rows = _stored(source, news, lease)
    source.seen = [list(dataclasses.astuple(each)) for each in news.seen]
    with transaction.atomic(), recorded_at_end():  # the source's row is locked after the event
        before = Dataset.objects.filter(name=source.name).first()
        dataset = versions.version_add(
            name=source.name, rows=rows, kind=versions.Kind.PULL, appends=news.appends
        )
        is_new = before is None or before.version != dataset.version
        pull.status = Status.ADDED if is_new else Status.UNCHANGED
        if is_new:
            pull.version, pull.added_rows = dataset.version, rows.num_rows
        _end(source, pull, lease)


def _pull_captured(source: DatasetSource, pull: DatasetPull, lease: _Lease) -> None:
    """Add the captured requests whose rows the dataset lacks. Raises as `_pull`."""
    wanted = captured_rows.source_filter(source.place)
    lease.renew()
    pull.status = Status.UNCHANGED
    try:
        made = captured_rows.dataset_from_captured(
            name=source.name, wanted=wanted, appends=True, kind=versions.Kind.PULL
        )
    except InvalidRequest as error:
        if error.code != "nothing_captured":
            raise
    else:
        if made.num_added:
            pull.status, pull.version = Status.ADDED, made.dataset.version
            pull.added_rows = made.num_added
    _end(source, pull, lease)


def _stored(source: DatasetSource, news: _News, lease: _Lease) -> Rows:
    """Put the file of rows into the store. Raises as `content_begin`."""
    tenant_id, num_bytes = source.tenant_id, news.path.stat().st_size
    sha256 = _sha256(news.path, num_bytes)
    lease.renew()
    contents.content_begin(tenant_id, sha256, num_bytes)
    storage.upload(news.path, dataset_key(tenant_id, sha256))
    lease.renew()
    return Rows(sha256=sha256, num_bytes=num_bytes, num_rows=news.num_rows)


class _Reading:
    """A reader of a source's objects into a folder, which finds the new rows."""

    def __init__(self, source: DatasetSource, place: Place, lease: _Lease, folder: Path) -> None:
        self._tenant_id, self._place, self._lease = source.tenant_id, place, lease
        self._path, self._one = folder / "rows.jsonl", folder / "object.jsonl"
        self._before = {name: _Seen(name, *rest) for name, *rest in source.seen}
        self._num_bytes = self._num_rows = 0

    def news(self) -> _News | None:
        """Return the news; None: there are none."""
        found = self._place.listed()
        if not found and not self._before:
            raise PullFailed("There is no object whose name ends in .jsonl: check the prefix.")
        changed = [each for each in found if self._is_changed(each)]
        if not changed and all(each.name in self._before for each in found):
            return None
        seen = dict(self._before)
        try:
            for remote in found:
                if remote.name not in self._before or self._is_changed(remote):
                    seen[remote.name] = self._read(remote, after=self._before.get(remote.name))
            appends = True
        except _Rewritten:
            self._path.unlink(missing_ok=True)
            self._num_bytes = self._num_rows = 0
            seen = {remote.name: self._read(remote) for remote in found}
            appends = False
        if not self._num_rows:
            raise PullFailed("The objects have no rows.")
        return _News(self._path, self._num_rows, appends, list(seen.values()))

    def _is_changed(self, remote: Remote) -> bool:
        known = self._before.get(remote.name)
        return known is not None and known.tag != remote.tag

    def _read(self, remote: Remote, after: _Seen | None = None) -> _Seen:
        """Add an object's new rows, those behind its old end, to the file. Raises _Rewritten."""
        sha256 = hashlib.sha256()
        with self._place.opened(remote, settings.MAX_DATASET_BYTES) as answer:
            with self._one.open("wb") as file:
                renewed_at = time.monotonic()
                for piece in answer.pieces():
                    sha256.update(piece)
                    file.write(piece)
                    if time.monotonic() - renewed_at > _RENEW_S:
                        self._lease.renew()
                        renewed_at = time.monotonic()
        stated = answer.headers.get("Content-Length")
        if stated not in (None, str(self._one.stat().st_size)):
            raise PullFailed(f"{remote.name[:300]} ended before its stated length.", is_final=False)
        start = 0 if after is None else self._end_of(after)
        self._check(remote, start)
        self._add(start)
        return _Seen(remote.name, remote.tag, sha256.hexdigest(), self._one.stat().st_size)

    def _end_of(self, after: _Seen) -> int:
        """Return where the new rows of the object begin. Raises _Rewritten."""
        if self._one.stat().st_size < after.num_bytes:
            raise _Rewritten
        if _sha256(self._one, after.num_bytes) != after.sha256:
            raise _Rewritten
        with self._one.open("rb") as file:
            file.seek(after.num_bytes - 1)
            around = file.read(2)
        if len(around) == 2 and b"\n" not in around:  # its last row was continued
            raise _Rewritten
        return after.num_bytes

    def _check(self, remote: Remote, start: int) -> None:
        """Raise PullFailed when the rows from `start` on are wrong, or too many."""
        num_bytes = self._one.stat().st_size - start
        self._num_bytes += num_bytes
        if self._num_bytes > settings.MAX_DATASET_BYTES:
            raise PayloadTooLarge(f"A dataset can have at most {settings.MAX_DATASET_BYTES} bytes.")
        self._lease.renew()
        if not _has_text(self._one, start):
            return
        found = row_check.rows_check(self._tenant_id, _pieces(self._one, start), num_bytes)
        self._lease.renew()
        if found.problems:
            behind = ", in what was added to it" if start else ""
            raise PullFailed(f"{remote.name[:300]}{behind}: {found.complaint}")
        self._num_rows += found.num_rows
        if self._num_rows > MAX_ROWS:
            raise PullFailed(f"There are more than {MAX_ROWS} rows: use a longer prefix.")

    def _add(self, start: int) -> None:
        last = b"\n"
        with self._path.open("ab") as file:
            for last in _pieces(self._one, start):
                file.write(last)
            if not last.endswith(b"\n"):
                file.write(b"\n")


class _Rewritten(Exception):
    """Raised when an object has changed otherwise than by more bytes."""


def _pieces(path: Path, start: int = 0) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while piece := file.read(_PIECE_BYTES):
            yield piece


def _has_text(path: Path, start: int) -> bool:
    return any(piece.strip() for piece in _pieces(path, start))


def _sha256(path: Path, num_bytes: int) -> str:
    """Return the digest of a file's first bytes."""
    digest, left = hashlib.sha256(), num_bytes
    for piece in _pieces(path):
        digest.update(piece[:left])
        left -= len(piece[:left])
        if not left:
            break
    return digest.hexdigest()
