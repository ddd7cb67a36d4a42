"""Read, write and check the bytes of files."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

from django.conf import settings

from controlplane.errors import InvalidRequest, PayloadTooLarge
from controlplane.files.models import File, Purpose
from controlplane.infra import storage
from controlplane.training.datasets import row_check

MAX_FILE_BYTES = 512 * 1024**2
MAX_BATCH_BYTES = 200 * 1024**2
#: Interval of a writer's heartbeats.
_HEARTBEAT_S = 15.0
#: Bytes per read from the store, so that no connection stays open between lines.
_WINDOW_BYTES = 4 * 1024**2


def most_bytes(purpose: Purpose) -> int:
    """Return the most bytes of a file; one for training becomes a dataset and has its limit."""
    if purpose == Purpose.FINE_TUNE:
        return int(settings.MAX_DATASET_BYTES)
    return MAX_BATCH_BYTES if purpose == Purpose.BATCH else MAX_FILE_BYTES


class FileWriter:
    """A writer of a file's bytes to the store as they arrive, which computes their digests.

    max_bytes  `write` raises PayloadTooLarge for more
    heartbeat  called regularly while bytes arrive
    """

    def __init__(
        self,
        key: str,
        *,
        max_bytes: int,
        has_md5: bool = False,
        heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        self._object = storage.ObjectWriter(key)
        self._max_bytes = max_bytes
        self._sha256 = hashlib.sha256()
        self._md5 = hashlib.md5(usedforsecurity=False) if has_md5 else None
        self.num_bytes = 0
        self._heartbeat = heartbeat
        self._last_heartbeat = time.monotonic()

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise PayloadTooLarge(
                f"The file can have at most {self._max_bytes} bytes.", param="file"
            )
        self._sha256.update(data)
        if self._md5 is not None:
            self._md5.update(data)
        self._object.write(data)
        if time.monotonic() - self._last_heartbeat >= _HEARTBEAT_S:
            self._last_heartbeat = time.monotonic()
            self._heartbeat()

    def finish(self) -> None:
        self._object.finish()

    def abort(self) -> None:
        self._object.abort()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    @property
    def md5(self) -> str:
        assert self._md5 is not None
        return self._md5.hexdigest()


def pieces(file: File, *, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the file's bytes from `start` to before `end`. Raises storage.ObjectMissing."""
    end = file.num_bytes if end is None else end
    while start < end:
        window = min(_WINDOW_BYTES, end - start)
        yield from storage.read_pieces(file.key, max_bytes=window, start=start)
        start += window


def check(file: File, heartbeat: Callable[[], None] = lambda: None) -> None:
    """Check that the stored bytes are valid for the file's purpose.

    Raises InvalidRequest with the invalid lines, PayloadTooLarge for too many bytes, RateLimited
    when several of the tenant's are being checked. Sets `num_rows`, without saving it.

    heartbeat  called regularly during the check
    """
    purpose = Purpose(file.purpose)
    most = most_bytes(purpose)
    if file.num_bytes > most:
        raise PayloadTooLarge(
            f"A file for {purpose.value} can have at most {most} bytes.", param="file"
        )
    if file.num_bytes == 0:
        raise InvalidRequest("The file is empty.", param="file")
    if purpose == Purpose.FINE_TUNE:
        found = row_check.rows_check(
            file.tenant_id, _beating(pieces(file), heartbeat), file.num_bytes
        )
        if found.problems:
            raise InvalidRequest(found.complaint, param="file", code="invalid_dataset")
        file.num_rows = found.num_rows


def _beating(found: Iterator[bytes], heartbeat: Callable[[], None]) -> Iterator[bytes]:
    last = time.monotonic()
    for piece in found:
        yield piece
        if time.monotonic() - last >= _HEARTBEAT_S:
            last = time.monotonic()
            heartbeat()
