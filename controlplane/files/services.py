"""All changes to files and uploads. They act for the tenant in scope.

A change with bytes in the store has three steps, without a transaction during calls to the store:
make the row, write the bytes, make the row ready.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
from collections.abc import Callable, Iterator
from typing import Any

from django.db import Error as DatabaseError
from django.db import close_old_connections, transaction
from django.db.models import Q, QuerySet, Sum
from django.utils import timezone

from controlplane.errors import Conflict, InvalidRequest, NotFound, Unavailable, require
from controlplane.events.audit.services import record
from controlplane.files import contents
from controlplane.files.contents import FileWriter
from controlplane.files.models import MADE, File, Purpose, Upload, UploadPart
from controlplane.infra import storage
from controlplane.infra.hooks import Hook
from controlplane.tenancy.model_scope import current_bounds
from controlplane.tenancy.public_ids import parse_id
from controlplane.usage.limits import quotas

log = logging.getLogger(__name__)

#: Default lifetime of a batch's input and output, as OpenAI's.
BATCH_FILE_LIFETIME_S = 30 * 24 * 3600
UPLOAD_LIFETIME = dt.timedelta(hours=1)
#: A file or part without a heartbeat for this time is abandoned.
SILENCE = dt.timedelta(minutes=3)
MAX_PART_BYTES = 64 * 1024**2
MAX_PARTS = 10_000

#: States of uploads that may still become a file.
PENDING = (Upload.Status.PENDING, Upload.Status.ASSEMBLING)

#: Returns the ids of files, in the current scope, that accepted work still reads. Their bytes stay
#: until that ends; then the sweep removes them.
files_in_use = Hook[[], QuerySet[Any, Any]]()

#: Returns the ids of files that the platform made for models which the caller may name: one query
#: for each kind of file.
files_made = Hook[[], list[QuerySet[Any, Any]]]()


def is_read() -> Q:
    """Return the condition for files that accepted work still reads."""
    found = Q(pk__in=[])
    for ids in files_in_use():
        found |= Q(pk__in=ids)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileForm:
    """The properties that its creator gives a file."""

    purpose: Purpose
    filename: str
    #: Seconds from its creation until it is removed; None: the purpose's default.
    expires_s: int | None = None

    def expires_at(self, created_at: dt.datetime) -> dt.datetime | None:
        seconds = self.expires_s
        if seconds is None and self.purpose in (Purpose.BATCH, Purpose.BATCH_OUTPUT):
            seconds = BATCH_FILE_LIFETIME_S
        return None if seconds is None else created_at + dt.timedelta(seconds=seconds)


@contextlib.contextmanager
def undone_on_failure(*undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo`, in order, when the block fails. Turn the store's errors into Unavailable."""
    try:
        yield
    except BaseException as error:
        for step in undo:
            step()
        if isinstance(error, storage.STORAGE_ERRORS):
            raise Unavailable("The object store does not answer.") from error
        raise


def files_list() -> QuerySet[File]:
    """Return the tenant's files that are ready and have not expired.

    Files that the platform makes are limited to those of models that the caller may name.
    """
    is_current = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    rows = File.objects.filter(is_current, status=File.Status.READY)
    if current_bounds() is None:
        return rows
    is_allowed = ~Q(purpose__in=MADE)
    for queries in files_made():
        for ids in queries:
            is_allowed |= Q(pk__in=ids)
    return rows.filter(is_allowed)


def file_get(public_id: str, *, param: str | None = None) -> File:
    """Return the ready file with this id. Raises NotFound."""
    pk = parse_id(File.PREFIX, public_id)
    found = files_list().filter(pk=pk).first() if pk else None
    return require(found, "There is no such file.", param=param)


@transaction.atomic
def file_begin(*, max_bytes: int, is_bounded: bool = True) -> File:
    """Make the row of a file that is about to be written, with at most `max_bytes` bytes.

    is_bounded  False: the platform writes it, and the tenant's storage quota does not apply
    Raises InvalidRequest when it does not fit into the tenant's storage.
    """
    if is_bounded:
        quotas.check("storage_bytes", max_bytes)
    return File.objects.create(num_bytes=max_bytes)


def file_writer(file: File, *, max_bytes: int, has_md5: bool = False) -> FileWriter:
    """Return a writer for the file's bytes; its heartbeats keep the file from the sweep."""
    heartbeat = _heartbeat(file, status=File.Status.UPLOADING)
    return FileWriter(file.key, max_bytes=max_bytes, has_md5=has_md5, heartbeat=heartbeat)


def _heartbeat(row: File | UploadPart, **unless_ended: object) -> Callable[[], None]:
    """Return a function that notes that the bytes of a file, or a part, still arrive."""

    def beat() -> None:
        rows = type(row).objects.filter(pk=row.pk, **unless_ended)
        try:
            rows.update(alive_at=timezone.now())
        except DatabaseError as error:
            log.warning("the heartbeat of %s was not written: %r", row, error)
        finally:
            close_old_connections()

    return beat


def file_written(file: File, form: FileForm, writer: FileWriter) -> None:
    """Finish writing, and set the properties of `file`, without saving them."""
    writer.finish()
    file.purpose, file.filename = form.purpose, form.filename[:255]
    file.num_bytes, file.sha256 = writer.num_bytes, writer.sha256
    file.expires_at = form.expires_at(file.created_at)


def file_finish(
    file: File, form: FileForm, writer: FileWriter, *, also: Callable[[], None] = lambda: None
) -> File:
    """Make a written file ready. Removes it and raises ApiError when its content is invalid.

    also  called in the same transaction; if it fails, the file is removed
    """
    with undone_on_failure(lambda: file_drop(file)):
        file_written(file, form, writer)
        contents.check(file, _heartbeat(file, status=File.Status.UPLOADING))
        with transaction.atomic():
            file_publish(file)
            also()
    return file


@transaction.atomic
def file_publish(file: File) -> None:
    """Make the file's row ready. Raises Conflict when the sweep has removed it."""
    file.status = File.Status.READY
    fields = ("purpose", "filename", "num_bytes", "num_rows", "sha256", "expires_at", "status")
    moved = File.objects.filter(pk=file.pk, status=File.Status.UPLOADING).update(
        **{name: getattr(file, name) for name in fields}
    )
    if moved != 1:
        raise Conflict("The upload of the file took too long.")
    recorded = ("purpose", "filename", "num_bytes", "sha256")
    record("created", file, after={name: getattr(file, name) for name in recorded})


def file_drop(file: File) -> None:
    """Remove a file that is neither ready nor read; the sweep repeats what fails here."""
    rows = File.objects.filter(pk=file.pk)
    try:
        # The row first, so that it cannot become ready. It may already be, although its creator got
        # an error: the connection may be lost after the commit.
        rows.filter(status=File.Status.UPLOADING).update(status=File.Status.DELETING)
        if rows.filter(is_read() | Q(status=File.Status.READY)).exists():
            return
        storage.delete([file.key])
        rows.filter(status=File.Status.DELETING).delete()
    except Exception:
        log.warning("file %s is left to the sweep", file.pk, exc_info=True)


def file_delete(file: File) -> None:
    """Delete a file; its bytes are removed when nothing reads them. Raises NotFound."""
    if not _remove(file, "deleted"):
        raise NotFound("There is no such file.")


def file_expire(file: File) -> None:
    """Delete an expired file, if it still exists."""
    _remove(file, "expired")


def _remove(file: File, action: str) -> bool:
    with transaction.atomic():
        moved = File.objects.filter(pk=file.pk, status=File.Status.READY).update(
            status=File.Status.DELETING
        )
        if moved != 1:
            return False
        record(action, file, before={"purpose": file.purpose, "filename": file.filename})
    file_drop(file)
    return True


@transaction.atomic
def upload_create(*, form: FileForm, num_bytes: int, mime_type: str) -> Upload:
    """Begin an upload of a file in parts. Raises InvalidRequest."""
    most = contents.most_bytes(form.purpose)
    if num_bytes > most:
        raise InvalidRequest(
            f"A file for {form.purpose} can have at most {most} bytes.", param="bytes"
        )
    quotas.check("storage_bytes", num_bytes)
    upload = Upload.objects.create(
        purpose=form.purpose,
        filename=form.filename,
        mime_type=mime_type,
        num_bytes=num_bytes,
        expires_at=timezone.now() + UPLOAD_LIFETIME,
        file_expires_s=form.expires_s,
    )
    record("created", upload, after={"filename": form.filename, "num_bytes": num_bytes})
    return upload


def upload_get(public_id: str) -> Upload:
    """Return the upload with this id. Raises NotFound."""
    pk = parse_id(Upload.PREFIX, public_id)
    upload = Upload.objects.select_related("file").filter(pk=pk).first() if pk else None
    upload = require(upload, "There is no such upload.")
    if upload.status == Upload.Status.ASSEMBLING and _is_left(upload.file):
        _reopen(upload, upload.file)
        upload.refresh_from_db()
    return upload


def _is_left(file: File | None) -> bool:
    """Return whether nobody assembles an upload's file any more."""
    if file is None or file.status != File.Status.UPLOADING:
        return True
    return file.alive_at <= timezone.now() - SILENCE


def _reopen(upload: Upload, file: File | None) -> None:
    """End the attempt to assemble this file; another may follow."""
    rows = Upload.objects.filter(pk=upload.pk, status=Upload.Status.ASSEMBLING)
    # file=None: its row is already deleted.
    rows.filter(Q(file=file) | Q(file=None)).update(status=Upload.Status.PENDING, file=None)


@transaction.atomic
def part_begin(upload: Upload, *, max_bytes: int) -> UploadPart:
    """Make the row of a part that is about to be written. Raises Conflict, InvalidRequest."""
    upload = Upload.objects.select_for_update().get(pk=upload.pk)
    _check_open(upload)
    parts = upload.parts.all()
    sent = parts.aggregate(sum=Sum("num_bytes"))["sum"] or 0
    # Twice, because a client sends a part again when the answer was lost.
    if sent + max_bytes > 2 * (upload.num_bytes + MAX_PART_BYTES) or parts.count() >= MAX_PARTS:
        raise InvalidRequest(
            "The upload has too many parts or bytes: use larger parts, or a smaller file.",
            param="data",
        )
    return UploadPart.objects.create(upload=upload, num_bytes=max_bytes)


def part_writer(part: UploadPart) -> FileWriter:
    """Return a writer for the part's bytes; its heartbeats keep the part from the sweep."""
    heartbeat = _heartbeat(part, is_ready=False, alive_at__isnull=False)
    return FileWriter(part.key, max_bytes=MAX_PART_BYTES, heartbeat=heartbeat)


def part_finish(part: UploadPart, writer: FileWriter) -> None:
    """Make a written part ready. Raises Conflict if the sweep removed it, or its upload ended."""
    with undone_on_failure(lambda: part_drop(part)):
        writer.finish()
        part.num_bytes, part.is_ready = writer.num_bytes, True
        with transaction.atomic():
            upload = Upload.objects.select_for_update().get(pk=part.upload_id)
            _check_open(upload)
            rows = UploadPart.objects.filter(pk=part.pk, alive_at__isnull=False)
            if not rows.update(num_bytes=part.num_bytes, is_ready=True):
                raise Conflict("The upload of the part took too long.")


def part_give_up(part: UploadPart) -> None:
    """Remove an abandoned part, and release its bytes."""
    rows = UploadPart.objects.filter(pk=part.pk, is_ready=False)
    # The row first, so that it cannot become ready: its writer may only be paused.
    rows.filter(alive_at__lte=timezone.now() - SILENCE).update(alive_at=None)
    if rows.filter(alive_at=None).exists():
        part_drop(part)


def part_drop(part: UploadPart) -> None:
    """Remove an incomplete part; the sweep repeats what fails here."""
    try:
        storage.delete([part.key])
        UploadPart.objects.filter(pk=part.pk).delete()
    except Exception:
        log.warning("part %s is left to the sweep", part.pk, exc_info=True)


def upload_complete(upload: Upload, *, part_ids: list[str], md5: str | None) -> Upload:
    """Assemble a file from parts, in the given order. A completed upload stays as it is.

    Raises Conflict for an upload that was cancelled or has expired, InvalidRequest for parts that
    are not its own or do not have the stated length in total; the upload then stays pending.
    """
    if upload.status == Upload.Status.COMPLETED:
        return upload  # the answer was lost
    parts = _parts(upload, part_ids)
    total = sum(part.num_bytes for part in parts)
    if total != upload.num_bytes:
        raise InvalidRequest(
            f"The parts have {total} bytes in total; the upload states {upload.num_bytes}.",
            param="part_ids",
        )
    with transaction.atomic():
        file = File.objects.create(num_bytes=0)  # its bytes are counted with the upload
        _move(upload, Upload.Status.PENDING, Upload.Status.ASSEMBLING, file=file)
    try:
        _assemble(upload, file, parts, md5)
    except BaseException as error:
        _reopen(upload, file)
        if isinstance(error, storage.ObjectMissing):  # another process has assembled it
            raise _ended(upload) from error
        raise
    parts_drop(upload)
    return upload_get(upload.public_id)


def _parts(upload: Upload, part_ids: list[str]) -> list[UploadPart]:
    _check_open(upload)
    found = {part.public_id: part for part in upload.parts.filter(is_ready=True)}
    if len(set(part_ids)) != len(part_ids):
        raise InvalidRequest("part_ids names a part twice: name each once.", param="part_ids")
    for part_id in part_ids:
        if part_id not in found:
            raise InvalidRequest(
                f"There is no part {part_id[:100]} of this upload.", param="part_ids"
            )
    return [found[part_id] for part_id in part_ids]


def _assemble(upload: Upload, file: File, parts: list[UploadPart], md5: str | None) -> None:
    writer = file_writer(file, max_bytes=upload.num_bytes, has_md5=True)
    form = FileForm(
        purpose=Purpose(upload.purpose),
        filename=upload.filename,
        expires_s=upload.file_expires_s,
    )
    close_old_connections()  # the rest is slow
    with undone_on_failure(writer.abort, lambda: file_drop(file)):
        for part in parts:
            for piece in storage.read_pieces(part.key, max_bytes=max(1, part.num_bytes)):
                writer.write(piece)
        if md5 is not None and md5.lower() != writer.md5:
            raise InvalidRequest(f"The parts' MD5 is {writer.md5}.", param="md5")

    def complete() -> None:
        rows = Upload.objects.filter(pk=upload.pk, status=Upload.Status.ASSEMBLING, file=file)
        if not rows.update(status=Upload.Status.COMPLETED):
            raise _ended(upload)
        record("completed", upload, after={"file": file.public_id})

    file_finish(file, form, writer, also=complete)


def upload_cancel(upload: Upload) -> Upload:
    """Cancel an upload. Raises Conflict for one that is completed or has expired."""
    if upload.status == Upload.Status.CANCELLED:
        return upload
    with transaction.atomic():
        _move(upload, Upload.Status.PENDING, Upload.Status.CANCELLED)
        record("cancelled", upload)
    parts_drop(upload)
    return upload


def parts_drop(upload: Upload) -> None:
    """Remove the parts of an upload that has ended; the sweep repeats what fails here."""
    for part in upload.parts.all():
        part_drop(part)


def _move(upload: Upload, before: str, after: str, **values: object) -> None:
    moved = Upload.objects.filter(pk=upload.pk, status=before).update(status=after, **values)
    if moved != 1:
        raise _ended(upload)
    upload.status = after


def _ended(upload: Upload) -> Conflict:
    """Return the error for a change that the upload's current status does not allow."""
    status = Upload.objects.filter(pk=upload.pk).values_list("status", flat=True).first()
    if status == Upload.Status.ASSEMBLING:
        return Conflict("The upload is being assembled: wait for the result.")
    return Conflict(f"The upload is {status}.")


def _check_open(upload: Upload) -> None:
    if upload.status != Upload.Status.PENDING:
        raise _ended(upload)
    if upload.expires_at <= timezone.now():
        raise Conflict("The upload has expired: begin a new one.")


def storage_used() -> int:
    """Return the bytes of the tenant's files and pending uploads."""
    files = File.objects.aggregate(sum=Sum("num_bytes"))["sum"] or 0
    uploads = Upload.objects.filter(status__in=PENDING).aggregate(sum=Sum("num_bytes"))["sum"] or 0
    return int(files) + int(uploads)
