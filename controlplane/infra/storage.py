"""The object store; the only file of the control plane that uses S3."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime as dt
import functools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.client import Config
from botocore.exceptions import BotoCoreError, ClientError
from django.conf import settings

from controlplane.errors import Unavailable

#: The exceptions of every function here when the store fails or cannot be reached.
STORAGE_ERRORS = (BotoCoreError, ClientError, Boto3Error)
_PIECE_BYTES = 1 << 20
#: The size of one part of a multipart upload; S3 requires at least 5 MiB and at most 10,000 parts.
PART_BYTES = 8 << 20


#: Largest part of a copy within the store, so that each call is answered in time.
_COPYING = TransferConfig(multipart_threshold=256 << 20, multipart_chunksize=256 << 20)


class ObjectMissing(Exception):
    """Raised when there is no object under the key."""


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Raise Unavailable in place of the store's errors in the block, for somebody who waits."""
    try:
        yield
    except STORAGE_ERRORS as error:
        raise Unavailable("The object store does not answer.") from error


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


def presign_get(key: str, *, filename: str, expires_s: int) -> str:
    """Return a URL with which its holder can GET `key`, to save it as `filename`."""
    url: str = _client(settings.S3_PUBLIC_ENDPOINT_URL).generate_presigned_url(
        "get_object",
        Params={
            "Bucket": settings.S3_BUCKET,
            "Key": key,
            "ResponseContentDisposition": f'attachment; filename="{filename}"',
        },
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
        if status == 416:  # the range begins behind the end
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
    """Make the bucket if it is missing; ignore other errors, which a write will raise."""
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


def copy(key: str, to: str) -> None:
    """Have the store copy an object; no byte passes through here. Raises ObjectMissing."""
    source = {"Bucket": settings.S3_BUCKET, "Key": key}
    try:
        _internal().copy(source, settings.S3_BUCKET, to, Config=_COPYING)
    except ClientError as error:
        if _is_missing(error):
            raise ObjectMissing(key) from error
        raise


def delete(keys: list[str]) -> None:
    for key in keys:
        _internal().delete_object(Bucket=settings.S3_BUCKET, Key=key)


class ObjectWriter:
    """A writer of an object, piece by piece, with one part in memory.

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
    pages = _internal().get_paginator("list_multipart_uploads")
    found = pages.paginate(Bucket=settings.S3_BUCKET, Prefix=prefix)
    return [
        upload
        for page in found
        for upload in page.get("Uploads") or []
        if upload["Key"].startswith(prefix)
    ]


def abort_parts(prefix: str) -> int:
    """Abort the unfinished writes under a prefix. -> their number."""
    return _abort(unfinished_writes(prefix))


def abort_old_parts(*, before: dt.datetime) -> int:
    """Abort the unfinished writes that began before this time. -> their number.

    Those of adapters' staging areas last as long as their versions: `orphaned_objects` ends them.
    """
    return _abort(
        [
            upload
            for upload in unfinished_writes("t/")
            if upload["Initiated"] < before and upload["Key"].split("/")[2:3] != ["u"]
        ]
    )


def _abort(uploads: list[dict[str, Any]]) -> int:
    for upload in uploads:
        with contextlib.suppress(ClientError):  # another sweep was faster
            _internal().abort_multipart_upload(
                Bucket=settings.S3_BUCKET, Key=upload["Key"], UploadId=upload["UploadId"]
            )
    return len(uploads)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A part of a multipart upload as the store lists it."""

    number: int
    num_bytes: int
    etag: str
    #: In hex; "" from a store that does not keep it.
    sha256: str


def multipart_begin(key: str) -> str:
    """Begin a multipart upload whose parts have SHA-256 checksums. -> its id in the store."""
    made = _internal().create_multipart_upload(
        Bucket=settings.S3_BUCKET, Key=key, ChecksumAlgorithm="SHA256"
    )
    return str(made["UploadId"])


def multipart_abort(key: str, upload_id: str) -> None:
    """End an upload; its parts are removed."""
    _abort([{"Key": key, "UploadId": upload_id}])


def presign_part(
    key: str, upload_id: str, number: int, *, num_bytes: int, sha256: str, expires_s: int
) -> tuple[str, dict[str, str]]:
    """Return a URL that takes exactly these bytes as a part, and the headers that it needs.

    sha256  in hex. It is signed, as is the length: S3 refuses other bytes. Not every store does.
    """
    checksum = base64.b64encode(bytes.fromhex(sha256)).decode()
    url: str = _client(settings.S3_PUBLIC_ENDPOINT_URL).generate_presigned_url(
        "upload_part",
        Params={
            "Bucket": settings.S3_BUCKET,
            "Key": key,
            "UploadId": upload_id,
            "PartNumber": number,
            "ContentLength": num_bytes,
            "ChecksumSHA256": checksum,
        },
        ExpiresIn=expires_s,
    )
    return url, {"Content-Length": str(num_bytes), "x-amz-checksum-sha256": checksum}


def multipart_parts(key: str, upload_id: str) -> dict[int, StoredPart] | None:
    """Return the parts that the store has, by number; None when it does not know the upload."""
    try:
        rows = list(_part_rows(key, upload_id))
    except ClientError as error:
        if _is_missing(error):
            return None
        raise
    return {
        row["PartNumber"]: StoredPart(
            number=row["PartNumber"],
            num_bytes=row["Size"],
            etag=row["ETag"],
            sha256=base64.b64decode(row.get("ChecksumSHA256") or "").hex(),
        )
        for row in rows
    }


def multipart_bytes(key: str, upload_id: str) -> int:
    """Return the bytes of all parts; some stores keep, and list, each copy of a repeated part."""
    try:
        return sum(row["Size"] for row in _part_rows(key, upload_id))
    except ClientError as error:
        if _is_missing(error):
            return 0
        raise


def _part_rows(key: str, upload_id: str) -> Iterator[dict[str, Any]]:
    pages = _internal().get_paginator("list_parts")
    for page in pages.paginate(Bucket=settings.S3_BUCKET, Key=key, UploadId=upload_id):
        yield from page.get("Parts") or []


def multipart_finish(key: str, upload_id: str, parts: list[StoredPart], sha256: list[str]) -> bool:
    """Make the object of these parts, in their order. -> False when the store has no such upload.

    sha256  of each part, in hex
    """
    rows = [
        {
            "PartNumber": part.number,
            "ETag": part.etag,
            "ChecksumSHA256": base64.b64encode(bytes.fromhex(digest)).decode(),
        }
        for part, digest in zip(parts, sha256, strict=True)
    ]
    try:
        _internal().complete_multipart_upload(
            Bucket=settings.S3_BUCKET,
            Key=key,
            UploadId=upload_id,
            MultipartUpload={"Parts": rows},
        )
    except ClientError as error:
        if _is_missing(error):
            return False
        raise
    return True


def _is_missing(error: ClientError) -> bool:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"]) == 404


#: The name of our rule among the bucket's CORS rules; others' stay.
CORS_RULE = "lorikeet-uploads"


def console_origins() -> list[str]:
    """Return the origins of the console's pages: BASE_URL by each name in ALLOWED_HOSTS."""
    base = urlsplit(settings.BASE_URL)
    port = f":{base.port}" if base.port else ""
    hosts = [base.hostname or "", *settings.ALLOWED_HOSTS]
    names = [f"*{host}" if host.startswith(".") else host for host in hosts if host != "*"]
    return list(dict.fromkeys(f"{base.scheme}://{name}{port}" for name in names))


def cors_allow() -> bool:
    """Let the console's pages send files to the bucket. -> whether that changed its rules."""
    rules = cors_rules()
    rule = {
        "ID": CORS_RULE,
        "AllowedOrigins": console_origins(),
        "AllowedMethods": ["PUT", "GET", "HEAD"],
        "AllowedHeaders": ["*"],
        "ExposeHeaders": ["ETag"],
        "MaxAgeSeconds": 3600,
    }
    if rule in rules:
        return False
    others = [other for other in rules if other.get("ID") != CORS_RULE]
    _internal().put_bucket_cors(
        Bucket=settings.S3_BUCKET, CORSConfiguration={"CORSRules": [rule, *others]}
    )
    return True


def cors_rules() -> list[dict[str, Any]]:
    """Return the bucket's CORS rules."""
    try:
        answer = _internal().get_bucket_cors(Bucket=settings.S3_BUCKET)
    except ClientError as error:
        if _is_missing(error):
            return []
        raise
    rules: list[dict[str, Any]] = answer.get("CORSRules") or []
    return rules
