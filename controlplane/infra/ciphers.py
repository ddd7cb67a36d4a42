"""Encrypt values that the database alone must not disclose: the pepper is kept outside it."""

from __future__ import annotations

import base64
import hmac

from cryptography.fernet import Fernet
from django.conf import settings


def peppered_cipher(purpose: bytes) -> Fernet:
    """Return a cipher; its key is derived from the pepper, a different one for each purpose."""
    key = hmac.digest(settings.API_KEY_PEPPER.encode(), purpose, "sha256")
    return Fernet(base64.urlsafe_b64encode(key))
