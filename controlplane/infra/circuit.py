"""Bound how long a request waits for PostgreSQL, and remember that it does not answer.

A server that was stopped refuses connections, one that hangs keeps them open and says nothing. In
both cases one thread tries to connect until that succeeds. Until then the circuit is open: code
with patience (see `patience`) gets no connection and fails at once, so that requests neither
wait nor use up threads. All other code waits as it always does.

    closed    as far as is known, PostgreSQL answers
    doubted   a query failed or is late, and the thread has not succeeded yet
    open      doubted, and the thread has failed as well, or takes too long
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import psycopg
from django.db import InterfaceError, OperationalError
from django.db import connection as django_connection

log = logging.getLogger(__name__)

PROBE_INTERVAL_S = 0.5
#: Shortest connection timeout that libpq allows.
PROBE_TIMEOUT_S = 2
#: Time after which a doubt opens the circuit.
MAX_DOUBT_S = 1.0
#: Shortest wait, which still reads arrived bytes when the time is used up.
_LEAST_S = 0.01
#: SQLSTATEs of a server that cannot be used now: connection failure, too many connections, the
#: three that PostgreSQL gives while it starts and stops. One without any never came from a server.
_AWAY = ("08", "53300", "57P01", "57P02", "57P03")


class _Patience(NamedTuple):
    wait_s: float
    until: float  # time.monotonic()


_patience: ContextVar[_Patience | None] = ContextVar("database_patience", default=None)


@contextlib.contextmanager
def patience(wait_s: float, *, total_s: float = float("inf")) -> Iterator[None]:
    """Bound what the code inside waits for PostgreSQL.

    wait_s   for each answer and each connection
    total_s  for all of them together
    """
    token = _patience.set(_Patience(wait_s, time.monotonic() + total_s))
    try:
        yield
    finally:
        _patience.reset(token)


def patience_left() -> float | None:
    """Return the seconds that the next wait may take; None: no limit."""
    current = _patience.get()
    if current is None:
        return None
    return max(_LEAST_S, min(current.wait_s, current.until - time.monotonic()))


def is_away(error: BaseException | None) -> bool:
    """Return whether a database error means that PostgreSQL cannot be reached or used.

    A fault of a statement, a deadlock and the like do not.
    """
    if not isinstance(error, OperationalError | InterfaceError):
        return False
    state = getattr(error.__cause__, "sqlstate", None)
    return state is None or state.startswith(_AWAY)


class Circuit:
    """The state of PostgreSQL as this process knows it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_doubted = False
        self._doubted_at = 0.0
        self._has_failed = False

    @property
    def is_open(self) -> bool:
        is_late = self.is_doubted and time.monotonic() > self._doubted_at + MAX_DOUBT_S
        return self._has_failed or is_late

    def note(self, error: Exception) -> None:
        """Doubt, if the error says that PostgreSQL is away."""
        if is_away(error):
            self.doubt()

    def doubt(self) -> None:
        """Find out in a thread whether PostgreSQL answers; only one such thread runs."""
        with self._lock:
            if self.is_doubted:
                return
            self._doubted_at = time.monotonic()
            self.is_doubted = True
        threading.Thread(target=self._probe, name="database-probe", daemon=True).start()

    def _probe(self) -> None:
        while (error := _connection_error()) is not None:
            if not self._has_failed:
                log.error("PostgreSQL does not answer: %s", error)
            self._has_failed = True
            time.sleep(PROBE_INTERVAL_S)
        if self._has_failed:
            log.warning("PostgreSQL answers again")
        with self._lock:
            self._has_failed = self.is_doubted = False


def _connection_error() -> Exception | None:
    """Connect once. -> the error, if any"""
    try:
        parameters = django_connection.get_connection_params()
        parameters["connect_timeout"] = PROBE_TIMEOUT_S
        psycopg.connect(**parameters).close()
    except Exception as error:
        return error
    return None


circuit = Circuit()
