"""SandboxProcess: a process for jobs of unknown cost; it is killed past its limits and replaced.

The time limit counts the process's CPU time: on a busy machine a job takes longer, but may use as
much. The wall clock ends only a process that gets no CPU time at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from worker.engine_process.parent_death import die_with_parent

#: Makes the function that does the jobs; runs in the helper process.
Setup = Callable[..., Callable[..., Any]]

START_TIMEOUT_S = 60.0
#: Beside a busy engine, the helper gets a third of a core instead of half.
NICENESS = 5
#: Jobs take a second or two of CPU time; one that has not ended by then gets almost none.
FROZEN_S = 60.0


class Done(NamedTuple):
    """A job's result, and the CPU time that it took."""

    value: Any
    cpu_s: float


class SandboxLost(Exception):
    """The job exceeded its limit of time or memory, and its process was killed.

    cpu_s  CPU time that it took
    """

    def __init__(self, message: str, cpu_s: float = 0.0) -> None:
        super().__init__(message)
        self.cpu_s = cpu_s


class JobFailed(SandboxLost):
    """The job failed; its process still runs."""


class SandboxProcess:
    """Owns one process, started when it is first needed. It does one job at a time, in order.

    setup         a module-level function; called with `args` in the process
    memory_bytes  memory that a job may use, besides what `setup` has used
    """

    def __init__(self, name: str, setup: Setup, *args: Any, memory_bytes: int) -> None:
        self._name, self._setup, self._args = name, setup, args
        self._memory_bytes = memory_bytes
        self._process: Any = None
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()

    async def call(self, *job: Any, cpu_s: float) -> Done:
        """Do the job within `cpu_s` of CPU time; raise SandboxLost if it needs more.

        If the call is cancelled, the job still runs to its end, so that its answer is not taken for
        the next job's.
        """
        task = asyncio.create_task(self._call(job, cpu_s))
        task.add_done_callback(_note_failure)
        return await asyncio.shield(task)

    async def _call(self, job: tuple[Any, ...], cpu_s: float) -> Done:
        async with self._turn:
            connection = await asyncio.to_thread(self._started)
            began = time.monotonic()
            try:
                return await asyncio.to_thread(_ask, connection, self._process.pid, job, cpu_s)
            except JobFailed:
                raise
            except SandboxLost:
                self.stop()
                raise
            except (EOFError, OSError) as error:
                if self._has_run_out():
                    message = f"it took longer than {cpu_s:g} s of processor time"
                    raise SandboxLost(message, cpu_s) from error
                spent = min(time.monotonic() - began, cpu_s)  # an upper bound
                raise SandboxLost("it used more memory than it may", spent) from error

    def _has_run_out(self) -> bool:
        """Clean up after the process has died; return whether the kernel's timer killed it."""
        process = self._process
        if process is not None:
            process.join(1.0)  # its pipe closes a moment before it can be reaped
        self.stop()
        return process is not None and process.exitcode == -signal.SIGPROF

    async def start(self) -> None:
        """Start the process before its first job."""
        async with self._turn:
            with contextlib.suppress(SandboxLost):
                await asyncio.to_thread(self._started)

    def stop(self) -> None:
        """End the process at once."""
        process, self._process, self._connection = self._process, None, None
        if process is not None:
            process.kill()
            process.join()

    def _started(self) -> Connection:
        """Return the connection to the process, started if there is none; raise SandboxLost."""
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
        except OSError as error:  # no memory, or no more processes allowed
            own.close()
            raise SandboxLost(f"it cannot be started: {error}") from error
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
        raise SandboxLost("it cannot be started")


def _note_failure(task: asyncio.Task[Any]) -> None:
    """Retrieve the error of a job whose caller was cancelled, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _ask(connection: Connection, pid: int, job: tuple[Any, ...], cpu_s: float) -> Done:
    began = _processor_time(pid)
    connection.send((job, cpu_s))
    if not connection.poll(FROZEN_S):
        message = f"the machine gave it too little time within {FROZEN_S:g} s"
        raise SandboxLost(message, _processor_time(pid) - began)
    failed, value, spent = connection.recv()
    if failed:
        raise JobFailed(value, spent)
    return Done(value, spent)


def _processor_time(pid: int) -> float:
    """Return the CPU seconds of a process so far.

    The clock's number is as in Linux's clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def _serve(connection: Connection, setup: Setup, args: tuple[Any, ...], memory_bytes: int) -> None:
    """Run the process: do jobs until the other end of the pipe closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it is doing
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    work = setup(*args)
    _limit_memory(memory_bytes)
    with contextlib.suppress(EOFError, OSError):
        connection.send(None)
        while True:
            job, cpu_s = connection.recv()
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # counts all its threads
            try:
                answer = False, work(*job)
            except MemoryError:
                os._exit(1)
            except RecursionError:
                answer = True, "it is nested too deeply"
            except Exception as error:  # the process lives on for the next job
                traceback.print_tb(error.__traceback__)  # no message: it may quote a client
                answer = True, f"it failed with {type(error).__name__}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send((*answer, time.process_time() - began))


def _limit_memory(num_bytes: int) -> None:
    """Limit this process's growth to `num_bytes`; allocations beyond that fail."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, used + num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
