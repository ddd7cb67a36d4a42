"""Run blocking work in threads, and return their database connections to the pool."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from asgiref.sync import sync_to_async
from django.db import DataError, close_old_connections
from django.db import Error as DatabaseError

from controlplane.errors import InvalidRequest, Unavailable
from controlplane.infra.circuit import circuit, is_away, patience
from controlplane.infra.outages import DatabaseAway

_T = TypeVar("_T")

#: Time limit of a database's answer, or of a connection to it.
QUERY_WAIT_S = 10.0


async def in_thread(work: Callable[[], _T], *, executor: ThreadPoolExecutor | None = None) -> _T:
    """Run the work, then return its connection at once: the rest of the request may take minutes.

    executor  the thread pool to use; None: Django's thread of the request
    """

    def run() -> _T:
        try:
            return work()
        finally:
            close_old_connections()

    if executor is None:
        return await sync_to_async(run)()
    return await sync_to_async(run, thread_sensitive=False, executor=executor)()


async def query_in_thread(
    work: Callable[[], _T],
    *,
    executor: ThreadPoolExecutor | None = None,
    total_s: float = float("inf"),
) -> _T:
    """Run the work as `in_thread` does; turn the database's errors into ours.

    total_s  most seconds of all waiting for the database together
    Raises InvalidRequest for characters that cannot be stored, DatabaseAway when the database
    cannot be reached, Unavailable for all its other errors.
    """

    def patiently() -> _T:
        with patience(QUERY_WAIT_S, total_s=total_s):
            try:
                return work()
            finally:
                close_old_connections()

    try:
        return await in_thread(patiently, executor=executor)
    except DataError as error:
        raise InvalidRequest("The request has characters that cannot be stored.") from error
    except DatabaseError as error:
        circuit.note(error)
        if is_away(error):
            raise DatabaseAway from error
        raise Unavailable("The database does not answer.", retry_after_s=2) from error
