"""The object store; the only file of the control plane that talks S3."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError
from django.conf import settings

#: What any function here raises when the store cannot be reached or fails.
STORAGE_ERRORS = (BotoCoreError, ClientError)
_PIECE_BYTES = 1 << 20
#: Of an object that is written piece by piece; S3 wants at least 5 MiB, and at most 10,000 parts.
PART_BYTES = 8 << 20


class ObjectMissing(Exception):
    """Raised when there is no object under the key."""


@functools.cache
def _client(endpoint_url: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=settings.S3_ACCESS_KEY_ID,
        aws_secret_access_key=settings.S3_SECRET_ACCESS_KEY,
        region_name=settings.S3_REGION,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            connect_timeout=5,
            read_timeout=60,
            max_pool_connections=64,  # of threads that stream files at one time
            retries={"max_attempts": 3, "mode": "standard"},
        ),
    )


def _internal() -> Any:
    return _client(settings.S3_ENDPOINT_URL)


def presign_put(key: str, *, num_bytes: int, expires_s: int = 900) -> str:
    """A URL that lets its holder PUT exactly `num_bytes` bytes to `key`.

    The length is signed: a body of another length is refused by the store.
    """
    url: str = _client(settings.S3_PUBLIC_ENDPOINT_URL).generate_presigned_url(
        "put_object",
        Params={"Bucket": settings.S3_BUCKET, "Key": key, "ContentLength": num_bytes},
        ExpiresIn=expires_s,
    )
    return url


def object_size(key: str) -> int | None:
    """The object's length in bytes, or None when there is none."""
    try:
        head = _internal().head_object(Bucket=settings.S3_BUCKET, Key=key)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
            return None
        raise
    return int(head["ContentLength"])


def read_bytes(key: str, *, max_bytes: int) -> bytes:
    """The object's first `max_bytes` bytes at most. Raises ObjectMissing."""
    return b"".join(read_pieces(key, max_bytes=max_bytes))


def read_pieces(key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes]:
    """At most `max_bytes` bytes of the object from `start` on, in pieces. Raises ObjectMissing."""
    try:
        answer = _internal().get_object(
            Bucket=settings.S3_BUCKET, Key=key, Range=f"bytes={start}-{start + max_bytes - 1}"
        )
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status == 404:
            raise ObjectMissing(key) from error
        if status == 416:  # there is no such byte
            return
        raise
    with contextlib.closing(answer["Body"]) as body:
        yield from body.iter_chunks(_PIECE_BYTES)


def keys(prefix: str) -> Iterator[str]:
    """The objects whose keys begin so."""
    pages = _internal().get_paginator("list_objects_v2")
    for page in pages.paginate(Bucket=settings.S3_BUCKET, Prefix=prefix):
        for entry in page.get("Contents") or []:
            yield entry["Key"]


def upload(path: Path, key: str) -> None:
    _internal().upload_file(str(path), settings.S3_BUCKET, key)


def put_bytes(key: str, data: bytes) -> None:
    _internal().put_object(Bucket=settings.S3_BUCKET, Key=key, Body=data)


def delete(keys: list[str]) -> None:
    for key in keys:
        _internal().delete_object(Bucket=settings.S3_BUCKET, Key=key)


class ObjectWriter:
    """An object that is written piece by piece, in the memory of one part.

    There is nothing under the key before `finish`, and never if `abort` comes instead.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []

    def write(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= PART_BYTES:
            self._send(bytes(self._buffer[:PART_BYTES]))
            del self._buffer[:PART_BYTES]

    def finish(self) -> None:
        if self._upload_id is None:
            put_bytes(self._key, bytes(self._buffer))
            return
        if self._buffer:
            self._send(bytes(self._buffer))
        _internal().complete_multipart_upload(
            **self._target(), MultipartUpload={"Parts": self._parts}
        )

    def abort(self) -> None:
        """Leave nothing behind; what the store keeps in spite of it, `abort_old_parts` removes."""
        if self._upload_id is not None:
            with contextlib.suppress(*STORAGE_ERRORS):
                _internal().abort_multipart_upload(**self._target())

    def _send(self, part: bytes) -> None:
        if self._upload_id is None:
            made = _internal().create_multipart_upload(Bucket=settings.S3_BUCKET, Key=self._key)
            self._upload_id = made["UploadId"]
        number = len(self._parts) + 1
        sent = _internal().upload_part(**self._target(), PartNumber=number, Body=part)
        self._parts.append({"ETag": sent["ETag"], "PartNumber": number})

    def _target(self) -> dict[str, Any]:
        return {"Bucket": settings.S3_BUCKET, "Key": self._key, "UploadId": self._upload_id}


def abort_old_parts(*, before: dt.datetime) -> int:
    """End the writes that were begun before this and that nobody will finish. -> how many."""
    answer = _internal().list_multipart_uploads(Bucket=settings.S3_BUCKET, Prefix="t/")
    old = [upload for upload in answer.get("Uploads") or [] if upload["Initiated"] < before]
    for upload in old:
        with contextlib.suppress(ClientError):  # another sweep was faster
            _internal().abort_multipart_upload(
                Bucket=settings.S3_BUCKET, Key=upload["Key"], UploadId=upload["UploadId"]
            )
    return len(old)
