"""Words under a key of their tenant's own.

A tenant's key is random and stored sealed under one that is derived from the pepper, which is not
in the database. Deleting the tenant's key makes all that it sealed unreadable at once.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from cryptography.fernet import Fernet, InvalidToken

from controlplane.infra.ciphers import peppered_cipher


class Unreadable(Exception):
    """Raised when something was sealed under another key, or is no sealed thing."""


def new_key() -> bytes:
    """A fresh key, sealed."""
    return _master().encrypt(Fernet.generate_key())


def seal(words: dict[str, Any], wrapped_key: bytes) -> bytes:
    text = json.dumps(words, separators=(",", ":"), ensure_ascii=False)
    # A lone surrogate, which JSON from a client may hold, is no UTF-8: it becomes a question mark.
    packed = zlib.compress(text.encode("utf-8", "replace"), 1)
    return _tenants(wrapped_key).encrypt(packed)


def unseal(sealed: bytes, wrapped_key: bytes) -> dict[str, Any]:
    """What `seal` was given. Raises Unreadable."""
    try:
        packed = _tenants(wrapped_key).decrypt(sealed)
    except (InvalidToken, ValueError) as error:
        raise Unreadable from error
    words: dict[str, Any] = json.loads(zlib.decompress(packed))
    return words


def _tenants(wrapped_key: bytes) -> Fernet:
    return Fernet(_master().decrypt(wrapped_key))


def _master() -> Fernet:
    return peppered_cipher(b"request content")
