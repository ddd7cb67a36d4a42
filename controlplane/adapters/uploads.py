"""Multipart uploads of versions' files: part by part, in any order, resumable for a day.

The client states the SHA-256 of each part and gets a URL for exactly these bytes: length and
checksum are signed. The stated digests stay in the row, so that a client that begins again compares
its file with them, and `ingest` the bytes: some stores sign a checksum, but do not verify it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.db import transaction

from contract.adapters import peft_config, safetensors_header
from controlplane.adapters.models import AdapterVersion, VersionUpload
from controlplane.adapters.rejection import Reason, Rejected
from controlplane.errors import Conflict, InvalidRequest, NotFound, Unavailable, require
from controlplane.infra import storage

MAX_TENSORS_BYTES = 2 * 1024**3
#: The files of an adapter and the most bytes each may have.
FILES = {
    peft_config.FILE: peft_config.UPLOAD_LIMITS.max_bytes,
    safetensors_header.FILE: MAX_TENSORS_BYTES,
}
#: Largest number of a file's parts; S3 allows 10,000.
MAX_PARTS = 1000
MIN_PART_BYTES = 8 << 20
#: Largest number of parts that one call signs.
MAX_SIGNED = 100
URL_EXPIRES_S = 900
#: Time after its beginning when a version without all files is rejected.
EXPIRES_AFTER = dt.timedelta(days=1)
#: Number of copies of its parts, from broken connections, above which an upload is abuse.
MAX_COPIES = 4
_MIB = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
#: Largest number of parts that an error names.
_SHOWN = 5

Status = AdapterVersion.Status


def part_bytes_for(num_bytes: int) -> int:
    """Return the length of a file's parts: whole MiB, at least 8, so that there are few enough."""
    least = -(-num_bytes // MAX_PARTS)
    return max(MIN_PART_BYTES, -(-least // _MIB) * _MIB)


def uploads_begin(version: AdapterVersion, files: Mapping[str, int]) -> None:
    """Note that these files come by parts. The store hears of it with the first part."""
    for file, num_bytes in files.items():
        VersionUpload.objects.create(
            version=version, file=file, num_bytes=num_bytes, part_bytes=part_bytes_for(num_bytes)
        )


def parts_sign(
    *, version: AdapterVersion, file: str, digests: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a URL and headers for each of these parts of a file.

    digests  the part's SHA-256 in hex, by its number as text
    Raises InvalidRequest, NotFound when the file does not come by parts, Conflict when the version
    has its files, or when a part was stated with another digest; Unavailable without the store.
    """
    key, begun = _begun(version, file, digests)
    named = ""
    try:
        upload = _state_parts(version, file, digests, begun)
        named = upload.upload_id
    finally:
        if begun and begun != named:  # it was refused, or another call was faster
            _abort(key, begun)
    return [_signed(upload, int(number), digests[number]) for number in digests]


def _begun(version: AdapterVersion, file: str, digests: Mapping[str, str]) -> tuple[str, str]:
    """Begin the upload in the store unless it has begun; outside transactions, as it waits.

    -> the file's key, and the upload's id; "" if it was begun before.
    """
    check_open(version)
    upload = _upload(version, file)
    _check_parts(upload, digests)
    if upload.upload_id:
        return upload.key, ""
    with storage.answering():
        return upload.key, storage.multipart_begin(upload.key)


@transaction.atomic
def _state_parts(
    version: AdapterVersion, file: str, digests: Mapping[str, str], begun: str
) -> VersionUpload:
    """Store what the client said of the parts, and the upload's id unless it has one."""
    check_open(_locked(version))  # so that nobody completes or deletes it
    upload = _upload(version, file)
    _check_parts(upload, digests)
    upload.digests |= digests
    upload.upload_id = upload.upload_id or begun
    if not upload.upload_id:  # the store had dropped it between two queries
        raise Unavailable("The upload was restarted by another call: repeat this call.")
    upload.save(update_fields=["digests", "upload_id"])
    return upload


def _abort(key: str, upload_id: str) -> None:
    """End an upload that no row names; if that fails, the sweep finds it."""
    with contextlib.suppress(*storage.STORAGE_ERRORS):
        storage.multipart_abort(key, upload_id)


def check_open(version: AdapterVersion) -> None:
    """Raise Conflict unless the version still waits for its files."""
    if version.status != Status.UPLOADING:
        raise Conflict("The upload of this version has ended.", code="upload_ended")


def _upload(version: AdapterVersion, file: str) -> VersionUpload:
    upload = VersionUpload.objects.filter(version=version, file=file).first()
    if upload is None:
        raise NotFound(
            "This file does not come by parts: begin a version with multipart.", param="file"
        )
    return upload


def _locked(version: AdapterVersion) -> AdapterVersion:
    """Return the version as it is; it stays so until the transaction ends. Raises NotFound."""
    found = AdapterVersion.objects.select_for_update().filter(pk=version.pk).first()
    return require(found, "There is no such adapter version.")


def _check_parts(upload: VersionUpload, digests: Mapping[str, str]) -> None:
    for number, sha256 in digests.items():
        _check_part(upload, number, sha256)


def _check_part(upload: VersionUpload, number: str, sha256: str) -> None:
    where = f"parts.{number[:20]}"
    is_number = number.isascii() and number.isdecimal() and len(number) <= 4
    if not is_number or str(int(number)) != number or not 1 <= int(number) <= upload.num_parts:
        raise InvalidRequest(
            f"Number the parts of {upload.file} 1 to {upload.num_parts}.", param=where
        )
    if not _SHA256.fullmatch(sha256):
        raise InvalidRequest("A SHA-256 has 64 hexadecimal digits in lower case.", param=where)
    if upload.digests.get(number, sha256) != sha256:
        raise Conflict(
            f"Part {number} of {upload.file} was begun with other bytes: the file has changed. "
            "Begin a new version.",
            param=where,
            code="part_changed",
        )


def _signed(upload: VersionUpload, number: int, sha256: str) -> dict[str, Any]:
    url, headers = storage.presign_part(
        upload.key,
        upload.upload_id,
        number,
        num_bytes=upload.length_of(number),
        sha256=sha256,
        expires_s=URL_EXPIRES_S,
    )
    return {"number": number, "url": url, "method": "PUT", "headers": headers}


def upload_state(version: AdapterVersion) -> dict[str, Any]:
    """Return the parts of each file that were stated, and which of them the store has.

    Files that do not come by parts, or have been checked, are not named. Raises Unavailable.
    """
    found = VersionUpload.objects.filter(version=version).order_by("file")
    with storage.answering():
        files = {upload.file: _file_state(upload) for upload in found}
    return {
        "object": "adapter_upload",
        "adapter": version.adapter.name,
        "number": version.number,
        "status": version.status,
        "expires_at": version.created_at + EXPIRES_AFTER,
        "files": files,
    }


def _file_state(upload: VersionUpload) -> dict[str, Any]:
    stored = _stored_parts(upload)
    numbers = sorted(map(int, upload.digests))
    return {
        "num_bytes": upload.num_bytes,
        "part_bytes": upload.part_bytes,
        "num_parts": upload.num_parts,
        "parts": [
            {
                "number": number,
                "num_bytes": upload.length_of(number),
                "sha256": upload.digests[str(number)],
                "is_uploaded": stored is None or number in stored,
            }
            for number in numbers
        ],
    }


def _stored_parts(upload: VersionUpload) -> dict[int, storage.StoredPart] | None:
    """Return the parts that the store has as they were stated; None: the file is assembled."""
    if not upload.upload_id:
        return {}
    found = storage.multipart_parts(upload.key, upload.upload_id)
    if found is None:
        if storage.object_size(upload.key) == upload.num_bytes:
            return None
        # The store has dropped the upload: the next part begins it again.
        rows = VersionUpload.objects.filter(pk=upload.pk, upload_id=upload.upload_id)
        rows.update(upload_id="")
        return {}
    return {
        number: part
        for number, part in found.items()
        if str(number) in upload.digests
        and part.num_bytes == upload.length_of(number)
        and part.sha256 in ("", upload.digests[str(number)])
    }


def is_flooded(version: AdapterVersion) -> bool:
    """Return whether the store has far more bytes of the parts than were stated.

    A URL takes its part as often as a client sends it, and some stores keep each copy. Raises
    storage.STORAGE_ERRORS.
    """
    for upload in VersionUpload.objects.filter(version=version).exclude(upload_id=""):
        found = storage.multipart_bytes(upload.key, upload.upload_id)
        if found > MAX_COPIES * upload.num_bytes + MIN_PART_BYTES:
            return True
    return False


def files_assemble(version: AdapterVersion) -> None:
    """Make the version's files of their parts; does nothing for files that did not come by parts.

    A repeated call continues, and so does one at the same time: the store makes a file once. Call
    it outside of transactions, as the store may be slow. Raises Conflict, which names the
    parts that are missing; Unavailable.
    """
    version.refresh_from_db(fields=["status"])
    if version.status != Status.UPLOADING:
        return
    with storage.answering():
        for upload in VersionUpload.objects.filter(version=version).order_by("file"):
            _assemble(upload)


def _assemble(upload: VersionUpload) -> None:
    stored = _stored_parts(upload)
    if stored is None:
        return
    wanted = range(1, upload.num_parts + 1)
    missing = [str(number) for number in wanted if number not in stored]
    if not missing:
        parts = [stored[number] for number in wanted]
        digests = [upload.digests[str(number)] for number in wanted]
        if storage.multipart_finish(upload.key, upload.upload_id, parts, digests):
            return
        if storage.object_size(upload.key) == upload.num_bytes:
            return  # a first try, whose answer was lost, did it
        missing = [str(number) for number in wanted]
    more = ", …" if len(missing) > _SHOWN else ""
    raise Conflict(
        f"{upload.file} is not uploaded: of its {upload.num_parts} parts {len(missing)} are "
        f"missing: {', '.join(missing[:_SHOWN])}{more}.",
        param=upload.file,
        code="parts_missing",
    )


def verified(version: AdapterVersion, file: str, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a file's pieces, and compare its parts with the digests that the client stated.

    Files that did not come by parts have none. Raises Rejected after the last piece.
    """
    upload = VersionUpload.objects.filter(version=version, file=file).first()
    if upload is None:
        yield from pieces
        return
    number, left, digest = 1, upload.length_of(1), hashlib.sha256()
    damaged: list[Reason] = []
    for piece in pieces:
        yield piece
        rest = memoryview(piece)
        while rest and left > 0:
            digest.update(rest[:left])
            rest, left = rest[left:], left - len(rest[:left])
            if left == 0:
                if digest.hexdigest() != upload.digests.get(str(number)):
                    damaged.append(Reason(file, f"part {number} was damaged on its way"))
                number, digest = number + 1, hashlib.sha256()
                left = upload.length_of(number) if number <= upload.num_parts else 0
    if damaged:
        raise Rejected(damaged)
