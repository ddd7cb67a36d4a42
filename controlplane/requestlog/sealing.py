"""Encrypt content with a key of its tenant.

A tenant's key is random. It is stored encrypted with a key derived from the pepper, which is not in
the database. Deleting the tenant's key makes all its content unreadable at once.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from controlplane.infra.ciphers import is_under_current_pepper, peppered_cipher

_PURPOSE = b"request content"


class Unreadable(Exception):
    """Raised for bytes that were encrypted with another key, or not by `seal`."""


def new_key() -> bytes:
    """Return a new key, encrypted."""
    return _master().encrypt(Fernet.generate_key())


def renewed_key(wrapped_key: bytes) -> bytes:
    """Return the same key, encrypted under the current pepper. Raises Unreadable."""
    try:
        return _master().rotate(wrapped_key)
    except InvalidToken as error:
        raise Unreadable from error


def is_current(wrapped_key: bytes) -> bool:
    """Return whether the key is encrypted under the current pepper."""
    return is_under_current_pepper(_PURPOSE, wrapped_key)


def seal(words: dict[str, Any], wrapped_key: bytes) -> bytes:
    text = json.dumps(words, separators=(",", ":"), ensure_ascii=False)
    # A lone surrogate from a client's JSON cannot be encoded: it becomes a question mark.
    packed = zlib.compress(text.encode("utf-8", "replace"), 1)
    return _tenants(wrapped_key).encrypt(packed)


def unseal(sealed: bytes, wrapped_key: bytes) -> dict[str, Any]:
    """Return what `seal` encrypted. Raises Unreadable."""
    try:
        packed = _tenants(wrapped_key).decrypt(sealed)
    except (InvalidToken, ValueError) as error:
        raise Unreadable from error
    words: dict[str, Any] = json.loads(zlib.decompress(packed))
    return words


def _tenants(wrapped_key: bytes) -> Fernet:
    return Fernet(_master().decrypt(wrapped_key))


def _master() -> MultiFernet:
    return peppered_cipher(_PURPOSE)
