"""Idempotent writes: store the response to an Idempotency-Key, and replay it.

The record and the request's changes are one transaction: a second request with the same key waits
for the first, and the response is stored if and only if the change is made. An error changes
nothing and is not stored: the caller may try again.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from cryptography.fernet import InvalidToken, MultiFernet
from django.db import transaction
from django.db.models import QuerySet
from django.http import HttpResponse, HttpResponseBase
from django.utils import timezone
from rest_framework.response import Response

from controlplane.errors import Conflict, InvalidRequest
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
    """Raised for a request that was answered before, with its status and bytes of JSON."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__()
        self.status = status
        self.content = content

    @property
    def response(self) -> Response:
        """Return the stored answer as a response of Django REST framework."""
        return _Rendered(self.content, self.status)


class Attempt:
    """The first request with its key; `end` decides whether its transaction is committed."""

    def __init__(self, record: QuerySet[Any], cipher: MultiFernet) -> None:
        self._record = record
        self._cipher = cipher

    def end(self, response: HttpResponseBase) -> None:
        """Store a successful response; roll the transaction back after any other."""
        if not (isinstance(response, HttpResponse) and 200 <= response.status_code < 300):
            transaction.set_rollback(True)
            return
        self._record.update(
            status=response.status_code, answer=self._cipher.encrypt(response.content)
        )


def begin(
    route: str, body: Callable[[], bytes], caller: str, key: str, kept_in: type[_Record]
) -> Attempt:
    """Begin an idempotent write, in the transaction of the change and in the scope of its rows.

    route    the request's method and address
    caller   the caller, as in `Principal.label`
    kept_in  the table of such callers' records

    Raises Replay for a request that was answered before, InvalidRequest for an invalid key and for
    one that was used with another body, Conflict when the stored answer cannot be read.
    """
    if not (1 <= len(key) <= MAX_KEY_LENGTH and key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"{HEADER} must have 1 to {MAX_KEY_LENGTH} printable ASCII characters.", param=HEADER
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
    # Waits for another transaction that inserts the same key.
    rows.bulk_create([record], ignore_conflicts=True)
    kept = rows.get(**name)
    cipher = _cipher(key)
    if kept.pk == record.pk:
        return Attempt(rows.filter(pk=record.pk), cipher)
    if kept.body_sha256 != body_sha256:
        raise InvalidRequest(
            f"This {HEADER} was used with another body: choose a new one.",
            param=HEADER,
            code="idempotency_key_reused",
        )
    try:
        answer = cipher.decrypt(bytes(kept.answer))
    except InvalidToken as error:  # under a pepper that is no longer accepted
        raise Conflict(
            f"The request with this {HEADER} was carried out, but its answer can no longer be read."
        ) from error
    raise Replay(kept.status, answer)


def expire() -> None:
    """Delete expired records."""
    with all_tenants(reason="expired records of all tenants are deleted"):
        IdempotencyRecord.objects.filter(expires_at__lte=timezone.now()).delete()
        OperatorIdempotencyRecord.objects.filter(expires_at__lte=timezone.now()).delete()


def _cipher(key: str) -> MultiFernet:
    """Return a cipher that needs the pepper and the caller's key, which is not stored."""
    return peppered_cipher(b"idempotency " + key.encode())


class _Rendered(Response):
    """A rendered response."""

    def __init__(self, content: bytes, status: int) -> None:
        super().__init__(status=status, headers={REPLAYED_HEADER: "true"})
        self._bytes = content

    @property
    def rendered_content(self) -> bytes:  # type: ignore[override]  # as Response's own
        if self._bytes:
            self["Content-Type"] = "application/json"
        return self._bytes
