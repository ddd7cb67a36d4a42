"""Sign events as Standard Webhooks does, with a secret that is stored encrypted.

https://www.standardwebhooks.com: the signature is an HMAC-SHA256 of `id.timestamp.body`, in base64
behind "v1,"; several, separated by spaces, while a secret is being replaced. The key is the part of
the secret behind "whsec_", in base64.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
from typing import Any

from cryptography.fernet import InvalidToken

from controlplane.events.outbox.models import OutboxEvent
from controlplane.infra.ciphers import is_under_current_pepper, peppered_cipher

_PREFIX = "whsec_"
_KEY_BYTES = 32
_PURPOSE = b"webhook secret"


class Unreadable(Exception):
    """Raised for a secret that is under a pepper which is not configured."""


def new_secret() -> str:
    return _PREFIX + base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()


def seal(secret: str) -> bytes:
    return peppered_cipher(_PURPOSE).encrypt(secret.encode())


def unseal(sealed: bytes) -> str:
    """Return what `seal` encrypted. Raises Unreadable."""
    try:
        return peppered_cipher(_PURPOSE).decrypt(bytes(sealed)).decode()
    except InvalidToken as error:
        raise Unreadable from error


def renewed(sealed: bytes) -> bytes:
    """Return the same secret, encrypted under the current pepper. Raises Unreadable."""
    try:
        return peppered_cipher(_PURPOSE).rotate(bytes(sealed))
    except InvalidToken as error:
        raise Unreadable from error


def is_current(sealed: bytes) -> bool:
    """Return whether the secret is encrypted under the current pepper."""
    return is_under_current_pepper(_PURPOSE, bytes(sealed))


def body_of(event: OutboxEvent) -> bytes:
    """Return the bytes of the event, the same at each attempt."""
    content: dict[str, Any] = {
        "id": event.public_id,
        "object": "event",
        "type": event.type,
        "created_at": int(event.created_at.timestamp()),
        "timestamp": event.created_at.isoformat().replace("+00:00", "Z"),
        "data": event.data,
    }
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def headers_of(event_id: str, timestamp: int, body: bytes, keys: list[str]) -> dict[str, str]:
    """Return the three headers; one signature for each secret, the current one first."""
    return {
        "webhook-id": event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(_signature(event_id, timestamp, body, key) for key in keys),
    }


def _signature(event_id: str, timestamp: int, body: bytes, secret: str) -> str:
    key = base64.b64decode(secret.removeprefix(_PREFIX))
    digest = hmac.digest(key, f"{event_id}.{timestamp}.".encode() + body, "sha256")
    return f"v1,{base64.b64encode(digest).decode()}"
