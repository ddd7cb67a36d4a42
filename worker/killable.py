"""A process for work that may prove too much: it is killed then, and another takes its place."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from worker.processes import die_with_parent

#: Makes the function that does the jobs, in the helper's process.
Setup = Callable[..., Callable[..., Any]]

START_TIMEOUT_S = 60.0
#: Beside a busy engine the helper gets a third of a processor, not half of one.
NICENESS = 5


class HelperLost(Exception):
    """The job was too much: it took too long, or more memory than there is for it."""


class JobFailed(HelperLost):
    """The job has no answer, though its process lives."""


class Helper:
    """Owns one process, started when it is first needed. One job at a time, in their order.

    setup         a module-level function; called with `args` in the process
    memory_bytes  what a job may use beyond what `setup` has used
    """

    def __init__(self, name: str, setup: Setup, *args: Any, memory_bytes: int) -> None:
        self._name, self._setup, self._args = name, setup, args
        self._memory_bytes = memory_bytes
        self._process: Any = None
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()

    async def call(self, *job: Any, timeout_s: float) -> Any:
        """What the function makes of the job. Raises HelperLost.

        Cancelled, the job goes on to its end: its answer must not be taken for the next one's.
        """
        task = asyncio.create_task(self._call(job, timeout_s))
        task.add_done_callback(_note_failure)
        return await asyncio.shield(task)

    async def _call(self, job: tuple[Any, ...], timeout_s: float) -> Any:
        async with self._turn:
            connection = await asyncio.to_thread(self._started)
            try:
                return await asyncio.to_thread(_ask, connection, job, timeout_s)
            except JobFailed:
                raise
            except HelperLost:
                self.stop()
                raise
            except (EOFError, OSError) as error:
                self.stop()
                raise HelperLost("it used more memory than it may") from error

    async def start(self) -> None:
        """Be ready for the first job."""
        async with self._turn:
            with contextlib.suppress(HelperLost):
                await asyncio.to_thread(self._started)

    def stop(self) -> None:
        """End the process at once."""
        process, self._process, self._connection = self._process, None, None
        if process is not None:
            process.kill()
            process.join()

    def _started(self) -> Connection:
        """The connection to the process; starts it when there is none. Raises HelperLost."""
        if self._connection is not None and self._process.is_alive():
            return self._connection
        self.stop()
        context = multiprocessing.get_context("spawn")
        own, child_end = context.Pipe()
        process = context.Process(
            target=_serve,
            args=(child_end, self._setup, self._args, self._memory_bytes),
            name=self._name,
            daemon=True,
        )
        try:
            process.start()
        except OSError as error:  # no memory or process left for it
            own.close()
            raise HelperLost(f"it cannot be started: {error}") from error
        finally:
            child_end.close()
        self._process, self._connection = process, own
        try:
            if own.poll(START_TIMEOUT_S):
                own.recv()
                return own
        except (EOFError, OSError):
            pass
        self.stop()
        raise HelperLost("it cannot be started")


def _note_failure(task: asyncio.Task[Any]) -> None:
    """See the error of a job for which nobody waits any more."""
    if not task.cancelled():
        task.exception()


def _ask(connection: Connection, job: tuple[Any, ...], timeout_s: float) -> Any:
    connection.send(job)
    if not connection.poll(timeout_s):
        raise HelperLost(f"it took longer than {timeout_s:g} s")
    failed, value = connection.recv()
    if failed:
        raise JobFailed(value)
    return value


def _serve(connection: Connection, setup: Setup, args: tuple[Any, ...], memory_bytes: int) -> None:
    """The process's entry: do jobs until the other end goes away."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    work = setup(*args)
    _limit_memory(memory_bytes)
    connection.send(None)
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            try:
                answer = False, work(*job)
            except MemoryError:
                os._exit(1)
            except RecursionError:
                answer = True, "it is nested too deeply"
            except Exception as error:  # a fault of one job is not to cost the next its process
                traceback.print_tb(error.__traceback__)  # the message may have a client's words
                answer = True, f"it failed with {type(error).__name__}"
            connection.send(answer)


def _limit_memory(num_bytes: int) -> None:
    """Let this process grow by so much and no more; allocations beyond fail."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
