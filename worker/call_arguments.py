"""Check the arguments of a row's learned calls against the schemas of its tools.

Schemas are a stranger's: each check, and all of them, have a limit of CPU time. What is wrong is
told by its place alone: who reads a report need not be allowed to read the rows.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

from contract.training.row_messages import Row
from engine.dash.answer_check import make_check

NOT_CHECKED = "not checked"
_CHECK_CPU_S, _ALL_CPU_S = 1.0, 120.0


class _OutOfTime(BaseException):
    """A check took too long. Handlers inside the check must not catch this."""


class SchemaCheck:
    """Checks calls until the CPU time for all of them is used up."""

    def __init__(self, *, check_cpu_s: float = _CHECK_CPU_S, all_cpu_s: float = _ALL_CPU_S) -> None:
        self._check = make_check()
        self._check_cpu_s, self._left_s = check_cpu_s, all_cpu_s

    def fault(self, row: Row, call: dict[str, Any]) -> str | None:
        """Return where a call's arguments break their schema; None: nowhere.

        NOT_CHECKED when that takes too long, or the schema is none.
        """
        if self._left_s <= 0:
            return NOT_CHECKED
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        schema = next(
            tool["function"]["parameters"] for tool in row.tools if tool["function"]["name"] == name
        )
        begun = time.process_time()
        try:
            with _cpu_limit(self._check_cpu_s):
                found = self._check(json.dumps(schema), json.dumps(arguments))
        # jsonschema raises many kinds of errors for an invalid schema
        except (_OutOfTime, Exception):
            return NOT_CHECKED
        finally:
            self._left_s -= time.process_time() - begun
        # The message is "at /path: what is wrong"; its second part quotes the arguments.
        return None if found is None else found.partition(":")[0]


def learned_calls(row: Row) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the learned calls, each with its place in the messages."""
    for index in row.learned:
        for number, call in enumerate(row.messages[index].get("tool_calls", ())):
            yield f"messages[{index - row.num_added}].tool_calls[{number}]", call


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise _OutOfTime in the block after `seconds` of CPU time."""

    def end(number: int, frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
