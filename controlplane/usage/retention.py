"""Keep a partition for each month of usage records, and drop the months that are too old.

Dropping a month takes a moment, however many records it has. The totals stay.
"""

from __future__ import annotations

import datetime as dt
import logging

from django.conf import settings
from django.db import connection, transaction

from controlplane.tenancy.scoping import all_tenants
from controlplane.usage.models import UsageRecord

log = logging.getLogger(__name__)

#: Time ahead for which partitions are created.
_AHEAD = dt.timedelta(days=92)
#: Time limit of a change of partitions, for which writers wait; the next turn repeats it.
_LOCK_TIMEOUT = "2s"
_PIECE = 5000


def usage_forget(*, now: dt.datetime) -> list[str]:
    """Make the partitions to come and drop old ones. -> the names of the dropped ones.

    Raises django.db.OperationalError when other transactions use the records for too long.
    """
    oldest = now - dt.timedelta(days=settings.USAGE_DAYS)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"set local lock_timeout = '{_LOCK_TIMEOUT}'")
        cursor.execute("select usage_partitions_make(%s)", (now + _AHEAD,))
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"set local lock_timeout = '{_LOCK_TIMEOUT}'")
        cursor.execute("select usage_partitions_drop(%s)", (oldest,))
        dropped: list[str] = cursor.fetchone()[0]
    if dropped:
        log.info("dropped usage records: %s", ", ".join(dropped))
    _delete_elsewhere(oldest)
    return dropped


def _delete_elsewhere(oldest: dt.datetime) -> None:
    """Delete old records that are in no month's partition: they were written with a wrong time."""
    with all_tenants(reason="old records of all tenants"), connection.cursor() as cursor:
        while True:
            cursor.execute(
                f"delete from {UsageRecord._meta.db_table} where occurred_at < %s and id in "
                "(select id from usage_usagerecord_other where occurred_at < %s limit %s)",
                (oldest, oldest, _PIECE),
            )
            if cursor.rowcount < _PIECE:
                return
