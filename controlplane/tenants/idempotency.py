"""Writes that may be sent twice: the answer to an Idempotency-Key is kept and given again.

The record and what the request changes are one transaction. So a second request with the same key
waits for the first, and there is no moment in which the change is made and the answer is not kept.
An answer that is an error changes nothing and is not kept: the caller may simply try again.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from cryptography.fernet import Fernet
from django.core.exceptions import RequestDataTooBig
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpResponse, HttpResponseBase
from django.utils import timezone
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import InvalidRequest, PayloadTooLarge
from controlplane.infra.ciphers import peppered_cipher
from controlplane.tenancy.scoping import all_tenants, new_id
from controlplane.tenants.models import (
    IdempotencyRecord,
    KeptAnswer,
    OperatorIdempotencyRecord,
)

HEADER = "Idempotency-Key"
REPLAYED_HEADER = "Idempotent-Replayed"
LIFETIME = dt.timedelta(hours=24)
MAX_KEY_LENGTH = 255

_Record = TypeVar("_Record", bound=KeptAnswer)


class Replay(Exception):
    """The request was answered before: with this status, and these bytes of JSON."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__()
        self.status = status
        self.content = content

    @property
    def response(self) -> Response:
        """As a view of Django REST framework answers."""
        return _Rendered(self.content, self.status)


class Attempt:
    """The first request with its key, inside the transaction that `end` decides on."""

    def __init__(self, record: QuerySet[Any], cipher: Fernet) -> None:
        self._record = record
        self._cipher = cipher

    def end(self, response: HttpResponseBase) -> None:
        """Keep an answer that is a success; undo the transaction behind any other."""
        if not (isinstance(response, HttpResponse) and 200 <= response.status_code < 300):
            transaction.set_rollback(True)
            return
        self._record.update(
            status=response.status_code, answer=self._cipher.encrypt(response.content)
        )


def begin(request: Request, caller: str, key: str, kept_in: type[_Record]) -> Attempt:
    """To be called in the transaction of the change, in the scope of its rows.

    caller   who asks, as `Principal.label` says it
    kept_in  the table of such callers' records

    Raises Replay for a request that was answered, InvalidRequest for a bad key and for one that
    was sent with another body.
    """
    route = f"{request.method} {request.get_full_path()}"
    return begin_write(route, lambda: _body(request), caller, key, kept_in)


def begin_write(
    route: str, body: Callable[[], bytes], caller: str, key: str, kept_in: type[_Record]
) -> Attempt:
    """`begin`, of any request: its method with its address, and how to get its body."""
    if not (1 <= len(key) <= MAX_KEY_LENGTH and key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"An {HEADER} has 1 to {MAX_KEY_LENGTH} printable ASCII characters.", param=HEADER
        )
    body_sha256 = hashlib.sha256(body()).hexdigest()
    name = {
        "caller": caller,
        "route": route[:500],
        "key_sha256": hashlib.sha256(key.encode()).hexdigest(),
    }
    now = timezone.now()
    rows: Any = kept_in.objects  # type: ignore[attr-defined]
    rows.filter(**name, expires_at__lte=now).delete()
    record = kept_in(id=new_id(), **name, body_sha256=body_sha256, expires_at=now + LIFETIME)
    # Waits for whoever is inserting the same key.
    rows.bulk_create([record], ignore_conflicts=True)
    kept = rows.get(**name)
    cipher = _cipher(key)
    if kept.pk == record.pk:
        return Attempt(rows.filter(pk=record.pk), cipher)
    if kept.body_sha256 != body_sha256:
        raise InvalidRequest(
            f"This {HEADER} was used with another body.",
            param=HEADER,
            code="idempotency_key_reused",
        )
    raise Replay(kept.status, cipher.decrypt(bytes(kept.answer)))


def expire() -> None:
    """Drop the records that nobody can ask for any more."""
    with all_tenants(reason="records of every tenant grow old"):
        IdempotencyRecord.objects.filter(expires_at__lte=timezone.now()).delete()
        OperatorIdempotencyRecord.objects.filter(expires_at__lte=timezone.now()).delete()


def _body(request: Request) -> bytes:
    try:
        return request._request.body
    except RequestDataTooBig as error:
        raise PayloadTooLarge(f"With an {HEADER} a body has to be shorter.") from error


def _cipher(key: str) -> Fernet:
    """Needs the caller's key, which is not stored, as well as the pepper."""
    return peppered_cipher(b"idempotency " + key.encode())


class _Rendered(Response):
    """An answer whose bytes are there already."""

    def __init__(self, content: bytes, status: int) -> None:
        super().__init__(status=status, headers={REPLAYED_HEADER: "true"})
        self._bytes = content

    @property
    def rendered_content(self) -> bytes:  # type: ignore[override]  # as Response's own
        if self._bytes:
            self["Content-Type"] = "application/json"
        return self._bytes
