"""Locks by name, where there is no row to lock. They are PostgreSQL's advisory locks."""

from __future__ import annotations

import hashlib

from django.db import connection


def lock_until_commit(name: str) -> None:
    """Wait for this lock and hold it until the transaction ends."""
    digest = hashlib.sha256(name.encode()).digest()
    number = int.from_bytes(digest[:8], "big", signed=True)
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", (number,))
