"""Slows down guessing of passwords: failures are counted per address and e-mail together."""

from __future__ import annotations

import hashlib

from django.core.cache import cache

MAX_FAILURES = 10
WINDOW_S = 15 * 60


def _key(address: str, email: str) -> str:
    digest = hashlib.sha256(f"{address}\n{email.lower()}".encode()).hexdigest()
    return f"sign-in-failures:{digest}"


def is_blocked(address: str, email: str) -> bool:
    """Whether too many sign-ins failed within the window."""
    return int(cache.get(_key(address, email), 0)) >= MAX_FAILURES


def count_failure(address: str, email: str) -> None:
    key = _key(address, email)
    # `add` starts the window; `incr` keeps its end.
    if not cache.add(key, 1, WINDOW_S):
        try:
            cache.incr(key)
        except ValueError:  # it ended between the two
            cache.set(key, 1, WINDOW_S)


def forget_failures(address: str, email: str) -> None:
    cache.delete(_key(address, email))
