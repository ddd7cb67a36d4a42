"""EngineLink: the IO process's end of the pipe; queues commands, passes reports to a callback.

Two threads do the blocking reads and writes, so that the event loop never waits for a long step, in
which the engine does not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import queue
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from worker.config import WorkerConfig, let_threads_sleep
from worker.engine_process.channel import Command, StepReport

if TYPE_CHECKING:
    from worker.engine_process.process import EngineFactory

log = logging.getLogger(__name__)

#: A killed process ends at once, unless a driver blocks it.
END_TIMEOUT_S = 5.0


def _child(
    connection: Connection, config: WorkerConfig, engine_factory: EngineFactory | None
) -> None:
    """Run the engine process, the only one that imports the engine."""
    let_threads_sleep()
    try:
        from worker.engine_process.process import create_engine, main

        main(connection, config, engine_factory or create_engine)
    except SystemExit as ended:  # the process has already said why
        os._exit(ended.code if isinstance(ended.code, int) else 1)
    except BaseException:
        try:
            traceback.print_exc()
        finally:
            os._exit(1)  # at once: the engine's threads would keep the process and the pipe alive


class EngineLink:
    """Owns the engine process."""

    def __init__(
        self, config: WorkerConfig, engine_factory: EngineFactory | None, *, name: str = "engine"
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(
            target=_child, args=(child_end, config, engine_factory), name=name, daemon=True
        )
        self._child_end = child_end
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()

    def start(self, on_report: Callable[[StepReport], None], on_lost: Callable[[], None]) -> None:
        """Start the process; both callbacks run in the current event loop.

        on_lost  called, perhaps twice, when the process has ended or the pipe is broken
        """
        loop = asyncio.get_running_loop()
        self._process.start()
        self._child_end.close()  # so that the stream ends when the child dies

        def post(callback: Callable[..., None], *args: StepReport) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(callback, *args)

        def read() -> None:
            while True:
                post(on_report, self._connection.recv())

        def guarded(work: Callable[[], None]) -> None:
            """Call `on_lost` however the thread ends."""
            try:
                work()
            except (EOFError, OSError):
                pass
            except BaseException:
                log.exception("a thread of the engine's link failed")
            finally:
                post(on_lost)

        for name, work in (("engine-reports", read), ("engine-commands", self._write)):
            threading.Thread(target=guarded, args=(work,), name=name, daemon=True).start()

    def send(self, command: Command) -> None:
        """Queue a command; all that are queued during a step are sent as one message."""
        self._commands.put(command)

    def _write(self) -> None:
        while (command := self._commands.get()) is not None:
            batch = [command]
            with contextlib.suppress(queue.Empty):
                while (more := self._commands.get_nowait()) is not None:
                    batch.append(more)
            self._connection.send(batch)

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def stop(self) -> None:
        """Kill the process, which has no state worth keeping; idempotent."""
        self._commands.put(None)
        self._process.kill()
        self._process.join(END_TIMEOUT_S)
        self._connection.close()
