"""The bytes of files: read in lines, written with their digest, checked for their purpose."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator

from contract import chat_rows
from controlplane.errors import InvalidRequest, PayloadTooLarge
from controlplane.files.models import File, Purpose
from controlplane.infra import storage
from controlplane.training.services import MAX_DATASET_BYTES

MAX_FILE_BYTES = 512 * 1024**2
MAX_BATCH_BYTES = 200 * 1024**2
#: Of a file for training, what a dataset may have: it is one.
MAX_BYTES = {Purpose.FINE_TUNE: MAX_DATASET_BYTES, Purpose.BATCH: MAX_BATCH_BYTES}
#: Whoever writes a file says so as often as this.
_SAY_ALIVE_S = 15.0
#: A read of the store is this long, so that no connection to it stays open between lines.
_WINDOW_BYTES = 4 * 1024**2


class FileWriter:
    """Writes a file's bytes to the store as they come, and says what they were.

    max_bytes  PayloadTooLarge is raised by the byte after them
    alive      called now and then while bytes come
    """

    def __init__(
        self,
        key: str,
        *,
        max_bytes: int,
        has_md5: bool = False,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._object = storage.ObjectWriter(key)
        self._max_bytes = max_bytes
        self._sha256 = hashlib.sha256()
        self._md5 = hashlib.md5(usedforsecurity=False) if has_md5 else None
        self.num_bytes = 0
        self._alive = alive
        self._said_alive_at = time.monotonic()

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise PayloadTooLarge(f"It may have {self._max_bytes} bytes at most.", param="file")
        self._sha256.update(data)
        if self._md5 is not None:
            self._md5.update(data)
        self._object.write(data)
        if time.monotonic() - self._said_alive_at >= _SAY_ALIVE_S:
            self._said_alive_at = time.monotonic()
            self._alive()

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
    """The file's bytes from `start` to before `end`, in pieces. Raises storage.ObjectMissing."""
    end = file.num_bytes if end is None else end
    while start < end:
        window = min(_WINDOW_BYTES, end - start)
        yield from storage.read_pieces(file.key, max_bytes=window, start=start)
        start += window


def lines(found: Iterable[bytes], *, max_bytes: int) -> Iterator[bytes]:
    """The lines of some bytes, without their ends.

    Of a line that is longer than `max_bytes` only its first `max_bytes` + 1 bytes come, so that
    no line is longer than this in memory.
    """
    kept, is_cut = bytearray(), False
    for piece in found:
        head, *tail = piece.split(b"\n")
        for index, part in enumerate([head, *tail]):
            if index:
                yield bytes(kept)
                kept, is_cut = bytearray(), False
            if not is_cut:
                kept += part[: max_bytes + 1 - len(kept)]
                is_cut = len(kept) > max_bytes
    if kept:
        yield bytes(kept)


def check(file: File) -> None:
    """Check that the stored bytes are what the file's purpose asks for.

    Raises InvalidRequest with the lines that are wrong, PayloadTooLarge for too many bytes.
    """
    purpose = Purpose(file.purpose)
    most = MAX_BYTES.get(purpose, MAX_FILE_BYTES)
    if file.num_bytes > most:
        raise PayloadTooLarge(f"A file for {purpose.value} has {most} bytes at most.", param="file")
    if file.num_bytes == 0:
        raise InvalidRequest("The file is empty.", param="file")
    if purpose == Purpose.FINE_TUNE:
        found = chat_rows.lint_lines(lines(pieces(file), max_bytes=chat_rows.MAX_LINE_BYTES))
        if found.problems:
            raise InvalidRequest(found.complaint, param="file", code="invalid_dataset")
