"""Run checks at the same time, each for a limited time; no failure hurts another check."""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from collections.abc import Callable, Iterable

from django.db import connections

#: The time limit of one check.
LIMIT_S = 3.0


class Status(enum.StrEnum):
    OK = "ok"
    #: It works, but somebody should look at it.
    WARNING = "warning"
    FAILURE = "failure"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    status: Status
    message: str
    #: The advice.
    advice: str = ""


def ok(message: str) -> Finding:
    return Finding(check="", status=Status.OK, message=message)


def warning(message: str, advice: str) -> Finding:
    return Finding(check="", status=Status.WARNING, message=message, advice=advice)


def failure(message: str, advice: str) -> Finding:
    return Finding(check="", status=Status.FAILURE, message=message, advice=advice)


#: A check: its name, and a function that returns its findings.
Check = tuple[str, Callable[[], Iterable[Finding]]]


def examine(checks: list[Check], *, limit_s: float = LIMIT_S) -> list[Finding]:
    """Run the checks; return their findings, in their order.

    A check that raises, or takes longer than `limit_s`, is a failure of its own.
    """
    running = [_Running(name, look) for name, look in checks]
    deadline = time.monotonic() + limit_s
    found: list[Finding] = []
    for check in running:
        found += check.findings(deadline, limit_s)
    return found


class _Running:
    """A check in a thread of its own; a hung one ends with the process."""

    def __init__(self, name: str, look: Callable[[], Iterable[Finding]]) -> None:
        self._name = name
        self._look = look
        self._found: list[Finding] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            found = list(self._look())
        except Exception as error:
            said = str(error).strip().splitlines() or [type(error).__name__]
            found = [failure(said[0], "correct what it names, then run this again")]
        finally:
            connections.close_all()
        self._found = [dataclasses.replace(finding, check=self._name) for finding in found]

    def findings(self, deadline: float, limit_s: float) -> list[Finding]:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._found is None:
            late = failure(f"no answer within {limit_s:g} s", "check that the server runs")
            return [dataclasses.replace(late, check=self._name)]
        return self._found
