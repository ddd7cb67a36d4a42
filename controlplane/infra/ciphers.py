"""Encrypt values that the database alone must not disclose: the pepper is kept outside it.

Values are written under `API_KEY_PEPPER`, and read under it and under `ACCEPTED_PEPPERS`, so that
the pepper can be changed.
"""

from __future__ import annotations

import base64
import hmac

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from django.conf import settings


def peppers() -> list[str]:
    """Return the peppers under which stored values are read, the one for new values first."""
    return [settings.API_KEY_PEPPER, *settings.ACCEPTED_PEPPERS]


def pepper_id(pepper: str) -> str:
    """Return a name of the pepper that does not disclose it: 16 hexadecimal digits."""
    return hmac.digest(pepper.encode(), b"pepper id", "sha256").hex()[:16]


def peppered_cipher(purpose: bytes) -> MultiFernet:
    """Return a cipher; its keys are derived from the peppers, different ones for each purpose."""
    return MultiFernet([_cipher(pepper, purpose) for pepper in peppers()])


def is_under_current_pepper(purpose: bytes, token: bytes) -> bool:
    """Return whether the value can be read without `ACCEPTED_PEPPERS`."""
    try:
        _cipher(settings.API_KEY_PEPPER, purpose).decrypt(token)
    except InvalidToken:
        return False
    return True


def _cipher(pepper: str, purpose: bytes) -> Fernet:
    key = hmac.digest(pepper.encode(), purpose, "sha256")
    return Fernet(base64.urlsafe_b64encode(key))
