"""Check rows before they are stored: in a sealed child, which is given them piece by piece.

The child has its own memory and its own interpreter, so that two gigabytes of one tenant neither
fill this process nor hold up its other requests.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import uuid
from collections.abc import Iterable
from typing import Any

from django.conf import settings

from contract import chat_rows, chat_rows_process
from contract.chat_rows import Lint, Problem
from controlplane.errors import InvalidRequest, Unavailable
from controlplane.infra import sealed_child
from controlplane.infra.sealed_child import Bounds
from controlplane.training import dataset_checks

log = logging.getLogger(__name__)

#: Fewer bytes are checked in this process: a child takes longer to start.
IN_PROCESS_BYTES = 1 << 20
_MODULE = chat_rows_process.__name__
_MEMORY_BYTES = 384 << 20
_CPU_S, _CPU_S_PER_GB = 60, 300
#: A busy machine gives a child a part of a core, and the store has its own pace.
_WALL_PER_CPU = 4
_ANSWER_BYTES = 64 << 10


def rows_check(tenant_id: uuid.UUID, pieces: Iterable[bytes], num_bytes: int) -> Lint:
    """Return what is wrong with rows, and their number.

    num_bytes  of all pieces
    Raises RateLimited when several of the tenant's are being checked, InvalidRequest when the
    check takes too much, Unavailable when it can be tried again, and what the pieces raise.
    """
    with dataset_checks.place(tenant_id):
        if num_bytes <= IN_PROCESS_BYTES:
            return chat_rows.lint(b"".join(pieces))
        return _in_child(pieces, num_bytes)


def _in_child(pieces: Iterable[bytes], num_bytes: int) -> Lint:
    cpu_s = _CPU_S + _CPU_S_PER_GB * num_bytes // 2**30
    bounds = Bounds(
        memory_bytes=_MEMORY_BYTES,
        cpu_s=cpu_s,
        wall_s=_WALL_PER_CPU * cpu_s,
        answer_bytes=_ANSWER_BYTES,
    )
    read_end, write_end = os.pipe()
    feeder = _Feeder(pieces, write_end)
    try:
        with open(read_end, "rb") as file:
            feeder.start()
            ended = sealed_child.run_sealed(
                _MODULE, {}, [file], environment=settings.TRAINER_ENVIRONMENT, bounds=bounds
            )
    except sealed_child.OverBounds as error:
        feeder.check()
        raise InvalidRequest(f"The check of the rows was ended: {error}.") from error
    except (sealed_child.Lost, sealed_child.Broken) as error:
        feeder.check()
        log.warning("a check of rows failed: %s", error)
        raise Unavailable("The rows could not be checked. Try again.") from error
    finally:
        feeder.join()  # it ends with the pipe's other end
    feeder.check()
    log.info(
        "rows checked",
        extra={"num_bytes": num_bytes, "cpu_s": ended.cpu_s, "peak_mb": ended.peak_bytes >> 20},
    )
    return _read(ended.answer)


class _Feeder(threading.Thread):
    """Writes pieces into a pipe; keeps the error of whoever makes them."""

    def __init__(self, pieces: Iterable[bytes], descriptor: int) -> None:
        super().__init__(name="row-check", daemon=True)
        self._pieces, self._descriptor = pieces, descriptor
        self._context = contextvars.copy_context()  # with the tenant's scope
        self._error: BaseException | None = None

    def run(self) -> None:
        self._context.run(self._feed)

    def _feed(self) -> None:
        try:
            with open(self._descriptor, "wb", buffering=0) as pipe:
                for piece in self._pieces:
                    left = memoryview(piece)
                    while left:
                        left = left[pipe.write(left) :]
        except BrokenPipeError:
            pass  # the child has seen enough
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what the pieces raised."""
        self.join()
        if self._error is not None:
            raise self._error


def _read(answer: dict[str, Any]) -> Lint:
    """Read the child's answer, of which only the form is certain. Raises Unavailable."""
    num_rows, told = answer.get("num_rows"), answer.get("problems")
    if type(num_rows) is int and isinstance(told, list) and len(told) <= chat_rows.MAX_PROBLEMS:
        if all(_is_problem(each) for each in told):
            return Lint(num_rows, [Problem(*each) for each in told])
    log.error("the check of rows answered in another form")
    raise Unavailable("The rows could not be checked. Try again.")


def _is_problem(told: Any) -> bool:
    if not isinstance(told, list) or [type(each) for each in told] != [int, str, str]:
        return False
    return all(len(text) <= 1000 and text.isprintable() for text in told[1:])
