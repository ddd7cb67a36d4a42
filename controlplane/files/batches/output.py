"""Write a batch's output and error files from its rows, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from controlplane.files.batches import results
from controlplane.files.batches.leases import Lease
from controlplane.files.batches.lines import LineFault, parse_line, unfinished_line
from controlplane.files.batches.models import Batch, BatchResult
from controlplane.files.models import File, Purpose
from controlplane.files.services import FileForm, file_begin, file_drop, file_writer, file_written
from controlplane.tenancy.scoping import tenant_scope

_PAGE = 100
#: No bound in practice: a batch's answers are kept whatever their length.
_MAX_BYTES = 1 << 40

_UNFINISHED = {
    Batch.Status.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    Batch.Status.CANCELLED: (
        "batch_cancelled",
        "This request was not executed before the batch was cancelled.",
    ),
    Batch.Status.FAILED: (
        "batch_failed",
        "This request was not executed before the batch ended; its errors say why.",
    ),
}


def write(lease: Lease, batch: Batch, raw_lines: Iterable[bytes]) -> None:
    """Write the files and end the batch. May be repeated after any failure.

    raw_lines  of the input file; the unanswered ones go into the error file
    """
    if batch.in_progress_at is None:  # it ended while it was checked
        results.end(lease, {})
        return
    files: dict[str, File] = {}
    try:
        with tenant_scope(lease.tenant_id):
            answers = _rows(batch, is_error=False)
            errors = _all_errors(lease, batch, raw_lines)
            for field, name, found in (
                ("output_file_id", "output", answers),
                ("error_file_id", "error", errors),
            ):
                file = _file(batch, name, found)
                if file is not None:
                    files[field] = file
        results.end(lease, files)
    except BaseException:
        with tenant_scope(lease.tenant_id):
            for file in files.values():
                file_drop(file)
        raise


def _file(batch: Batch, name: str, found: Iterator[str]) -> File | None:
    """Write a file of these lines, not yet published; None when there are none."""
    first = next(found, None)
    if first is None:
        return None
    file = file_begin(max_bytes=0, is_bounded=False)
    writer = file_writer(file, max_bytes=_MAX_BYTES)
    form = FileForm(
        purpose=Purpose.BATCH_OUTPUT,
        filename=f"{batch.public_id}_{name}.jsonl",
        expires_s=batch.output_expires_s,
    )
    try:
        writer.write(first.encode() + b"\n")
        for line in found:
            writer.write(line.encode() + b"\n")
        file_written(file, form, writer)
    except BaseException:
        writer.abort()
        file_drop(file)
        raise
    return file


def _rows(batch: Batch, *, is_error: bool) -> Iterator[str]:
    """Yield the results in the order of their lines."""
    last = 0
    while True:
        rows = BatchResult.objects.filter(batch=batch, is_error=is_error, line__gt=last)
        page = list(rows.order_by("line").values_list("line", "output")[:_PAGE])
        yield from (output for _, output in page)
        if len(page) < _PAGE:
            return
        last = page[-1][0]


def _all_errors(lease: Lease, batch: Batch, raw_lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines that failed, and then those that were not answered."""
    yield from _rows(batch, is_error=True)
    if batch.ends_as not in _UNFINISHED:
        return
    code, message = _UNFINISHED[Batch.Status(batch.ends_as)]
    done = results.done_lines(lease)
    for number, raw in enumerate(raw_lines, start=1):
        if number in done or not raw.strip():
            continue
        try:
            line = parse_line(number, raw, batch.endpoint)
        except LineFault:
            continue  # not a line that was validated
        yield unfinished_line(line.custom_id, code, message)
