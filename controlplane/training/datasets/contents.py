"""The rows of datasets in the object store: counted before the upload, removed when not needed.

Two datasets, or two uploads of one, may have the same rows, and then share one object. Rows with
appended rows have no object of their own, but the earlier rows' and one with the added rows.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import uuid
from collections.abc import Iterator

from django.db import transaction
from django.db.models import QuerySet, Sum
from django.db.models.expressions import RawSQL
from django.utils import timezone

from controlplane.infra import storage
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scoping import all_tenants, current_tenant_id, tenant_scope
from controlplane.training.models import DatasetContent, TrainingRun, dataset_key
from controlplane.usage.limits import quotas

#: Longest time of an upload from `content_begin` to its dataset's row.
KEPT = dt.timedelta(hours=1)
#: Number of contents removed in one sweep; the next one continues.
MAX_PER_TURN = 500
#: Bytes per read from the store, so that no connection stays open while they are worked on.
_WINDOW_BYTES = 8 << 20
#: Contents that a row names, and their parts.
_NEEDED = """
with recursive needed(tenant_id, sha256) as (
    select tenant_id, sha256 from training_dataset
    union select tenant_id, sha256 from training_datasetversion where is_stored
    union select tenant_id, unnest(array[dataset_sha256, validation_sha256])
        from training_trainingrun where status = any(%s)
    union select content.tenant_id, unnest(array[content.previous, content.added])
        from training_datasetcontent content
        join needed using (tenant_id, sha256) where content.added <> ''
)
select content.id from training_datasetcontent content join needed using (tenant_id, sha256)
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Checked rows in the store."""

    sha256: str
    num_bytes: int
    num_rows: int


def num_bytes() -> int:
    """Return the bytes of all contents of the tenant in scope."""
    return int(DatasetContent.objects.aggregate(sum=Sum("num_bytes"))["sum"] or 0)


@transaction.atomic
def content_begin(
    tenant_id: uuid.UUID, sha256: str, num_bytes: int, *, has_requests: bool = False
) -> None:
    """Reserve storage for rows before their upload. Raises InvalidRequest if the quota is full.

    has_requests  they are captured requests
    """
    quotas.lock("storage_bytes")
    _lock(tenant_id, sha256)
    rows = DatasetContent.objects.filter(sha256=sha256)
    fields = {"num_bytes": num_bytes, "wanted_at": timezone.now()}
    if has_requests:  # never reset: other rows like these may be captured ones
        fields["has_requests"] = True
    if not rows.update(**fields):
        quotas.check("storage_bytes", num_bytes)
        DatasetContent.objects.create(sha256=sha256, **fields)


def content_join(previous: str, added: str) -> str:
    """Return the digest of earlier rows with others appended, without copying them."""
    tenant_id = current_tenant_id()
    joined = hashlib.sha256(f"{previous}\n{added}".encode()).hexdigest()
    _lock(tenant_id, joined)
    rows, now = DatasetContent.objects.filter(sha256=joined), timezone.now()
    if not rows.update(wanted_at=now):
        DatasetContent.objects.create(
            sha256=joined,
            num_bytes=0,
            wanted_at=now,
            previous=previous,
            added=added,
            has_requests=has_requests(previous) or has_requests(added),
        )
    return joined


def has_requests(sha256: str) -> bool:
    """Return whether some of these rows of the tenant in scope are captured requests.

    Reading them, and texts that quote them, needs the permission `requests:content`. For rows that
    are not stored it is unknown: True.
    """
    row = DatasetContent.objects.filter(sha256=sha256).only("has_requests").first()
    return row is None or row.has_requests


def parts_of(sha256: str) -> list[str]:
    """Return the digests of the objects with these rows of the tenant in scope, in order."""
    made = DatasetContent.objects.exclude(added="").values_list("sha256", "previous", "added")
    joined = {whole: (previous, added) for whole, previous, added in made}
    parts: list[str] = []
    while sha256 in joined:
        sha256, added = joined[sha256]
        parts.append(added)
    return [sha256, *reversed(parts)]


def pieces(sha256: str) -> Iterator[bytes]:
    """Yield the bytes of rows of the tenant in scope; each part ends with a line end.

    Raises storage.ObjectMissing, storage.STORAGE_ERRORS.
    """
    tenant_id, parts = current_tenant_id(), parts_of(sha256)
    return _pieces([dataset_key(tenant_id, part) for part in parts])


def _pieces(keys: list[str]) -> Iterator[bytes]:
    for number, key in enumerate(keys):
        last = b""
        for last in _object(key):
            yield last
        if number < len(keys) - 1 and not last.endswith(b"\n"):
            yield b"\n"


def _object(key: str) -> Iterator[bytes]:
    start, is_over = 0, False
    while not is_over:
        found = 0
        for piece in storage.read_pieces(key, max_bytes=_WINDOW_BYTES, start=start):
            found += len(piece)
            yield piece
        start, is_over = start + found, found < _WINDOW_BYTES


def contents_sweep() -> int:
    """Remove contents of all tenants that no dataset names and no run will read. -> their number.

    Raises storage.STORAGE_ERRORS; the next sweep begins with those that are left.
    """
    with all_tenants(reason="find replaced rows of all tenants"):
        due = list(_unread().order_by("wanted_at")[:MAX_PER_TURN])
    num_removed = 0
    for content in due:
        with tenant_scope(content.tenant_id), transaction.atomic():
            # Nobody can upload it between query and removal: `content_begin` takes the lock, too.
            _lock(content.tenant_id, content.sha256)
            if _unread().filter(pk=content.pk).exists():
                if not content.added:
                    storage.delete([dataset_key(content.tenant_id, content.sha256)])
                content.delete()
                num_removed += 1
    return num_removed


def _unread() -> QuerySet[DatasetContent]:
    old = DatasetContent.objects.filter(wanted_at__lt=timezone.now() - KEPT)
    active = [status.value for status in TrainingRun.ACTIVE]
    return old.exclude(pk__in=RawSQL(_NEEDED, [active]))


def _lock(tenant_id: uuid.UUID, sha256: str) -> None:
    lock_until_commit(f"dataset {tenant_id} {sha256}")
