"""Encryption of what must not be read from the database alone: the pepper is not in it."""

from __future__ import annotations

import base64
import hmac

from cryptography.fernet import Fernet
from django.conf import settings


def peppered_cipher(purpose: bytes) -> Fernet:
    """A cipher whose key the pepper makes for this purpose, another for each."""
    key = hmac.digest(settings.API_KEY_PEPPER.encode(), purpose, "sha256")
    return Fernet(base64.urlsafe_b64encode(key))
