"""Upload rows: a few in one request; more as a file in parts, which becomes a version."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

from lorikeet_cli import progress
from lorikeet_cli.errors import CliError, Interrupted
from lorikeet_cli.session import Session
from lorikeet_cli.uploads import PIECE_BYTES, Source

#: Largest request with rows, in bytes: the server's limit.
DIRECT_BYTES = 32 << 20
PART_BYTES = 32 << 20
#: Seconds to wait while the server joins the parts and checks each row.
_COMPLETE_S = 1800.0


def upload_rows(session: Session, name: str, source: Source, *, appends: bool) -> dict[str, Any]:
    """Return the dataset after its rows were replaced, or after the file's rows were appended.

    Raises CliError.
    """
    try:
        if source.num_bytes <= DIRECT_BYTES:
            return _directly(session, name, source, appends)
        return _as_file(session, name, source, appends)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted: the dataset is as it was. Run it again.") from None


def _directly(session: Session, name: str, source: Source, appends: bool) -> dict[str, Any]:
    with progress.bar(source.path.name, total=source.num_bytes, is_bytes=True) as bar:
        dataset: dict[str, Any] = session.client.call(
            "POST",
            session.tenant_path("datasets"),
            params={"name": name, "append": "true" if appends else None},
            content=lambda: source.pieces(bar.show),
            headers={
                "Content-Length": str(source.num_bytes),
                "Content-Type": "application/jsonl",
            },
        )
    if not appends and dataset["sha256"] != source.sha256:
        raise CliError(
            f"{source.path} was damaged on its way: the digests differ. Upload it again."
        )
    return dataset


def _as_file(session: Session, name: str, source: Source, appends: bool) -> dict[str, Any]:
    path = session.own_path("datasets", name, "versions")  # raises for operators' keys
    client = session.client
    upload = client.call(
        "POST",
        "/v1/uploads",
        body={
            "filename": source.path.name[:255],
            "purpose": "fine-tune",
            "bytes": source.num_bytes,
            "mime_type": "application/jsonl",
            "expires_after": {"anchor": "created_at", "seconds": 3600},
        },
    )
    place = f"/v1/uploads/{upload['id']}"
    try:
        parts = _send_parts(session, source, place)
        done = client.call(
            "POST", f"{place}/complete", body={"part_ids": parts}, timeout_s=_COMPLETE_S
        )
    except BaseException:
        with contextlib.suppress(CliError):
            client.call("POST", f"{place}/cancel")
        raise
    file_id = done["file"]["id"]
    try:
        made: dict[str, Any] = client.call(
            "POST", path, body={"file": file_id, "append": appends}, timeout_s=_COMPLETE_S
        )
    finally:
        with contextlib.suppress(CliError):  # else it expires in an hour
            client.call("DELETE", f"/v1/files/{file_id}")
    return made


def _send_parts(session: Session, source: Source, place: str) -> list[str]:
    found: list[str] = []
    with progress.bar(source.path.name, total=source.num_bytes, is_bytes=True) as bar:
        for start in range(0, source.num_bytes, PART_BYTES):
            form = _Form(source, start, min(PART_BYTES, source.num_bytes - start))
            sent = session.client.call(
                "POST", f"{place}/parts", content=form.pieces, headers=form.headers
            )
            found.append(sent["id"])
            bar.show(start + form.num_bytes)
    return found


class _Form:
    """A part of a file as a form with one field, `data`, that each attempt reads from the start."""

    def __init__(self, source: Source, start: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._source, self._start = source, start
        boundary = uuid.uuid4().hex
        self._head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="data"; filename="part"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()
        self._tail = f"\r\n--{boundary}--\r\n".encode()
        self.headers = {
            "Content-Type": f"multipart/form-data; boundary={boundary}",
            "Content-Length": str(len(self._head) + num_bytes + len(self._tail)),
        }

    def pieces(self) -> Iterator[bytes]:
        yield self._head
        left = self.num_bytes
        try:
            with self._source.path.open("rb") as file:
                file.seek(self._start)
                while left and (piece := file.read(min(PIECE_BYTES, left))):
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise CliError(f"Cannot read {self._source.path}: {error.strerror}.") from error
        if left:
            raise CliError(f"{self._source.path} changed while it was uploaded. Run it again.")
        yield self._tail
