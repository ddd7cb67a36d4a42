"""Check or convert rows before they are stored: in a sealed child, which gets them in pieces.

The child has its own memory and its own interpreter, so that two gigabytes of one tenant neither
fill this process nor hold up its other requests.
"""

from __future__ import annotations

import base64
import contextvars
import logging
import os
import threading
import uuid
from collections.abc import Iterable
from typing import Any

from django.conf import settings

from contract.training import chat_rows, chat_rows_process, row_conversion_process
from contract.training.chat_rows import Lint, Problem
from controlplane.errors import InvalidRequest, Unavailable
from controlplane.infra import sealed_child
from controlplane.infra.sealed_child import Bounds
from controlplane.training.datasets import dataset_checks

log = logging.getLogger(__name__)

#: Fewer bytes are checked in this process: a child takes longer to start.
IN_PROCESS_BYTES = 1 << 20
_MEMORY_BYTES = 384 << 20
#: A conversion holds all rows as bytes and text, and its answer likewise.
_CONVERSION_MEMORY_BYTES = 640 << 20
_CPU_S, _CPU_S_PER_GB = 60, 300
#: A busy machine gives a child a part of a core, and the store has its own pace.
_WALL_PER_CPU = 4
_ANSWER_BYTES = 64 << 10


def rows_check(tenant_id: uuid.UUID, pieces: Iterable[bytes], num_bytes: int) -> Lint:
    """Return the problems of rows, and the number of rows.

    num_bytes  of all pieces
    Raises RateLimited when several of the tenant's are being checked, InvalidRequest when the
    check takes too much, Unavailable when it can be tried again, and what the pieces raise.
    """
    with dataset_checks.place(tenant_id):
        if num_bytes <= IN_PROCESS_BYTES:
            return chat_rows.lint(b"".join(pieces))
        return _read(_in_child(pieces, num_bytes))


def rows_convert(tenant_id: uuid.UUID, content: bytes, *, max_bytes: int) -> tuple[bytes, str]:
    """Return rows of other formats as rows of ours, and the names of their formats; "": none.

    max_bytes  of the converted rows
    Raises InvalidRequest for rows that would lose something, and as `rows_check`.
    """
    with dataset_checks.place(tenant_id):
        if len(content) <= IN_PROCESS_BYTES:
            told = row_conversion_process.convert(content, max_bytes=max_bytes)
        else:
            told = _in_child([content], len(content), converted_bytes=max_bytes)
    rows, formats, complaint = (told.get(name) for name in ("rows", "formats", "complaint"))
    if not isinstance(rows, str) or not _is_text(formats) or not _is_text(complaint):
        raise _in_another_form()
    if not formats:
        return content, ""
    if complaint:
        raise InvalidRequest(complaint, param="body", code="invalid_dataset")
    return base64.b64decode(rows), formats


def _in_child(
    pieces: Iterable[bytes], num_bytes: int, *, converted_bytes: int | None = None
) -> dict[str, Any]:
    """Return the answer of a child, which checks rows, or converts them within a limit of bytes."""
    cpu_s = _CPU_S + _CPU_S_PER_GB * num_bytes // 2**30
    if converted_bytes is None:
        module, work, more_bytes = chat_rows_process.__name__, {}, 0
    else:
        module, work = row_conversion_process.__name__, {"max_bytes": converted_bytes}
        more_bytes = converted_bytes * 4 // 3
    bounds = Bounds(
        memory_bytes=_MEMORY_BYTES if converted_bytes is None else _CONVERSION_MEMORY_BYTES,
        cpu_s=cpu_s,
        wall_s=_WALL_PER_CPU * cpu_s,
        answer_bytes=_ANSWER_BYTES + more_bytes,
    )
    read_end, write_end = os.pipe()
    feeder = _Feeder(pieces, write_end)
    try:
        with open(read_end, "rb") as file:
            feeder.start()
            ended = sealed_child.run_sealed(
                module, work, [file], environment=settings.TRAINER_ENVIRONMENT, bounds=bounds
            )
    except sealed_child.OverBounds as error:
        feeder.check()
        raise InvalidRequest(f"The check of the rows was stopped: {error}. Try again.") from error
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
    return ended.answer


class _Feeder(threading.Thread):
    """A thread that writes pieces into a pipe, and keeps the error of their source."""

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
        """Raise the error of the pieces' source, if any."""
        self.join()
        if self._error is not None:
            raise self._error


def _read(answer: dict[str, Any]) -> Lint:
    """Read the answer of the child, which is not trusted. Raises Unavailable."""
    num_rows, told = answer.get("num_rows"), answer.get("problems")
    if type(num_rows) is int and isinstance(told, list) and len(told) <= chat_rows.MAX_PROBLEMS:
        if all(_is_problem(each) for each in told):
            return Lint(num_rows, [Problem(*each) for each in told])
    raise _in_another_form()


def _in_another_form() -> Unavailable:
    log.error("the check of rows answered in the wrong form")
    return Unavailable("The rows could not be checked. Try again.")


def _is_problem(told: Any) -> bool:
    if not isinstance(told, list) or [type(each) for each in told] != [int, str, str]:
        return False
    return all(map(_is_text, told[1:]))


def _is_text(told: Any) -> bool:
    return isinstance(told, str) and len(told) <= 4000 and told.isprintable()
