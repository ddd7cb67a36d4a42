"""A connection that waits no longer than the code that uses it."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.abc import RV, PQGen

from controlplane.infra.circuit import patience_left

AWAY = "PostgreSQL does not answer in time."
#: psycopg's interval at which a wait looks for Ctrl-C.
INTERVAL_S = 0.1


class PatientConnection(psycopg.Connection[Any]):
    """A connection that closes itself when an answer is later than `infra.circuit.patience` allows.

    The server cannot be asked to bound it: a server that hangs bounds nothing, and its kernel keeps
    the connection alive.
    """

    def wait(
        self, gen: PQGen[RV], interval: float = INTERVAL_S, timeout: float | None = None
    ) -> RV:
        left = patience_left()
        if left is None or timeout is not None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, left)
        except psycopg.errors._WaitTimeout:
            self.close()  # the answer may still come, and must not be read as another statement's
            raise psycopg.OperationalError(AWAY) from None
