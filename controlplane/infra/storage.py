"""The object store; the only file of the control plane that uses S3."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError
from django.conf import settings

#: The exceptions of every function here when the store fails or cannot be reached.
STORAGE_ERRORS = (BotoCoreError, ClientError)
_PIECE_BYTES = 1 << 20
#: The size of one part of a multipart upload; S3 requires at least 5 MiB and at most 10,000 parts.
PART_BYTES = 8 << 20


class ObjectMissing(Exception):
    """Raised when there is no object under the key."""


@functools.cache
def _client(endpoint_url: str, patience_s: float | None = None) -> Any:
    """Return a client.

    patience_s  limit of each answer, without a second try; None: as for work in the background
    """
    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=settings.S3_ACCESS_KEY_ID,
        aws_secret_access_key=settings.S3_SECRET_ACCESS_KEY,
        region_name=settings.S3_REGION,
        config=Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            connect_timeout=patience_s or 5,
            read_timeout=patience_s or 60,
            max_pool_connections=64,  # one for each thread that streams a file
            retries={"max_attempts": 0 if patience_s else 3, "mode": "standard"},
        ),
    )


def _internal() -> Any:
    return _client(settings.S3_ENDPOINT_URL)


def check_answers(timeout_s: float) -> None:
    """Raise what boto3 raises unless the bucket answers within this time."""
    client = _client(settings.S3_ENDPOINT_URL, timeout_s)
    client.head_bucket(Bucket=settings.S3_BUCKET)


def presign_put(key: str, *, num_bytes: int, expires_s: int = 900) -> str:
    """Return a URL that lets its holder PUT exactly `num_bytes` bytes to `key`.

    The length is signed: the store refuses a body of another length.
    """
    url: str = _client(settings.S3_PUBLIC_ENDPOINT_URL).generate_presigned_url(
        "put_object",
        Params={"Bucket": settings.S3_BUCKET, "Key": key, "ContentLength": num_bytes},
        ExpiresIn=expires_s,
    )
    return url


def object_size(key: str) -> int | None:
    """Return the object's length in bytes, or None when there is no such object."""
    try:
        head = _internal().head_object(Bucket=settings.S3_BUCKET, Key=key)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
            return None
        raise
    return int(head["ContentLength"])


def read_bytes(key: str, *, max_bytes: int) -> bytes:
    """Return at most `max_bytes` bytes from the object's start. Raises ObjectMissing."""
    return b"".join(read_pieces(key, max_bytes=max_bytes))


def read_pieces(key: str, *, max_bytes: int, start: int = 0) -> Iterator[bytes]:
    """Yield at most `max_bytes` bytes from `start` on, in pieces. Raises ObjectMissing."""
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """An object as the store lists it."""

    key: str
    num_bytes: int
    etag: str


def objects(prefix: str, *, most: int | None = None) -> Iterator[StoredObject]:
    """Yield the objects whose keys begin with `prefix`; at most `most`."""
    pages = _internal().get_paginator("list_objects_v2")
    limit = {"PaginationConfig": {"MaxItems": most}} if most else {}
    for page in pages.paginate(Bucket=settings.S3_BUCKET, Prefix=prefix, **limit):
        for entry in page.get("Contents") or []:
            yield StoredObject(key=entry["Key"], num_bytes=entry["Size"], etag=entry["ETag"])


def keys(prefix: str) -> Iterator[str]:
    """Yield the keys that begin with `prefix`."""
    return (stored.key for stored in objects(prefix))


def upload(path: Path, key: str) -> None:
    _internal().upload_file(str(path), settings.S3_BUCKET, key)


def probe(*, patience_s: float) -> None:
    """Make the bucket if there is none, and write and delete an object, with little patience."""
    client = _client(settings.S3_ENDPOINT_URL, patience_s)
    ensure_bucket(client)
    key = f"preflight/{uuid.uuid4().hex}"
    client.put_object(Bucket=settings.S3_BUCKET, Key=key, Body=b"lorikeet")
    client.delete_object(Bucket=settings.S3_BUCKET, Key=key)


def ensure_bucket(client: Any = None) -> None:
    """Make the bucket if the store says there is none; ignore other errors, which a write names."""
    client = client or _internal()
    try:
        client.head_bucket(Bucket=settings.S3_BUCKET)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
            return
        where = (
            {}
            if settings.S3_REGION == "us-east-1"
            else {"CreateBucketConfiguration": {"LocationConstraint": settings.S3_REGION}}
        )
        client.create_bucket(Bucket=settings.S3_BUCKET, **where)


def put_bytes(key: str, data: bytes) -> None:
    _internal().put_object(Bucket=settings.S3_BUCKET, Key=key, Body=data)


def delete(keys: list[str]) -> None:
    for key in keys:
        _internal().delete_object(Bucket=settings.S3_BUCKET, Key=key)


class ObjectWriter:
    """Writes an object piece by piece; it keeps one part in memory.

    The object exists only after `finish`; after `abort` it never does.
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
        """Remove the written parts; `abort_old_parts` removes those that cannot be removed now."""
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


def unfinished_writes(prefix: str) -> list[dict[str, Any]]:
    """Return the multipart uploads under a prefix that are neither complete nor aborted."""
    answer = _internal().list_multipart_uploads(Bucket=settings.S3_BUCKET, Prefix=prefix)
    return [upload for upload in answer.get("Uploads") or [] if upload["Key"].startswith(prefix)]


def abort_parts(prefix: str) -> int:
    """Abort the unfinished writes under a prefix. -> how many."""
    return _abort(unfinished_writes(prefix))


def abort_old_parts(*, before: dt.datetime) -> int:
    """Abort the unfinished writes that began before this time. -> how many."""
    return _abort([upload for upload in unfinished_writes("t/") if upload["Initiated"] < before])


def _abort(uploads: list[dict[str, Any]]) -> int:
    for upload in uploads:
        with contextlib.suppress(ClientError):  # another sweep was faster
            _internal().abort_multipart_upload(
                Bucket=settings.S3_BUCKET, Key=upload["Key"], UploadId=upload["UploadId"]
            )
    return len(uploads)
