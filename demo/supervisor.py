"""Keep the demo's processes running: report one that ends, and start it again."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from demo.processes import ChildProcess

#: Seconds before a restart: short after a long run, longer after each early end.
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 30.0
LONG_LIFE_S = 60.0


@dataclasses.dataclass(slots=True)
class _Watched:
    process: ChildProcess
    started_at: float
    is_ours: bool  # whether the supervisor also stops it
    delay_s: float = FIRST_DELAY_S
    restart_at: float | None = None  # None: it runs


class Supervisor:
    """Starts processes, watches them at every `check`, and stops those that it started.

    report   called with a message whenever a process ended or was started again
    clock    monotonic seconds
    """

    def __init__(
        self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._clock = clock
        self._watched: list[_Watched] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, process: ChildProcess) -> None:
        process.start()
        with self._lock:
            self._watched.append(_Watched(process, self._clock(), is_ours=True))

    def watch(self, process: ChildProcess) -> None:
        """Restart a process that somebody else started; its owner stops it."""
        with self._lock:
            self._watched.append(_Watched(process, self._clock(), is_ours=False))

    def run_in_background(self, interval_s: float = 0.5) -> None:
        """Call `check` repeatedly, in a thread, until `stop`."""

        def run() -> None:
            while not self._stopping.wait(interval_s):
                self.check()

        self._thread = threading.Thread(target=run, name="supervisor", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Report processes that ended, and restart those that are due."""
        with self._lock:
            for watched in self._watched:
                if watched.restart_at is None:
                    self._notice_end(watched)
                elif self._clock() >= watched.restart_at:
                    self._restart(watched)

    def _notice_end(self, watched: _Watched) -> None:
        process, now = watched.process, self._clock()
        if process.is_running():
            return
        if now - watched.started_at > LONG_LIFE_S:
            watched.delay_s = FIRST_DELAY_S
        watched.restart_at = now + watched.delay_s
        watched.delay_s = min(MAX_DELAY_S, watched.delay_s * 2)
        end = describe_end(process.returncode)
        self._report(f"{process.name} {end}; starting it again. Log: {process.log}")

    def _restart(self, watched: _Watched) -> None:
        watched.process.start()
        watched.started_at = self._clock()
        watched.restart_at = None
        self._report(f"{watched.process.name} runs again (pid {watched.process.pid})")

    def stop(self) -> None:
        """Stop all that it started: signal all, then wait for each, the last started first."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        ours = [watched.process for watched in reversed(self._watched) if watched.is_ours]
        for process in ours:
            process.ask_to_stop()
        for process in ours:
            process.stop()


def describe_end(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        return f"was killed by signal {-returncode}"
    return f"ended with status {returncode}"
