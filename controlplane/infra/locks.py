"""Locks by name, for what no one row stands for. They are PostgreSQL's advisory locks."""

from __future__ import annotations

import hashlib

from django.db import connection


def lock_until_commit(name: str) -> None:
    """Wait for whoever else has this lock, and have it until the transaction ends."""
    digest = hashlib.sha256(name.encode()).digest()
    number = int.from_bytes(digest[:8], "big", signed=True)
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", (number,))
