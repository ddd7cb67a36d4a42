"""The demo's output: steps with their times, progress bars, answers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[float, str], None]  # (share done, current action)
#: A log file gets a line at least this often.
QUIET_S = 8.0


class Screen:
    """Prints a line for each finished step, and a bar or a spinner for the current one.

    Where it is not a terminal, a line every `quiet_s` says that a step still runs.
    """

    def __init__(self, console: Console | None = None, quiet_s: float = QUIET_S) -> None:
        # No markup and no emoji: the models' answers are printed unchanged.
        self.console = console or Console(highlight=False, markup=False, emoji=False)
        self._quiet_s = quiet_s

    def print(self, text: str = "", *, style: str | None = None) -> None:
        self.console.print(text, style=style, soft_wrap=True)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show a step of unknown length."""
        started = time.monotonic()
        with self.console.status(title) if self.console.is_terminal else self._lines(title):
            yield
        self._done(title, started)

    @contextlib.contextmanager
    def bar(self, title: str) -> Iterator[Report]:
        """Show a step that reports its progress."""
        started = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        if not self.console.is_terminal:
            with self._lines(title) as report:
                yield report
        else:
            with Progress(
                *columns, TimeElapsedColumn(), console=self.console, transient=True
            ) as progress:
                task = progress.add_task(title, total=1.0, note="")
                yield lambda share, note: progress.update(task, completed=share, note=note)
        self._done(title, started)

    @contextlib.contextmanager
    def _lines(self, title: str) -> Iterator[Report]:
        """Print a line every `quiet_s` with what was reported last, for a log file."""
        started, told = time.monotonic(), ""
        has_ended = threading.Event()

        def report(share: float, note: str) -> None:
            nonlocal told
            told = f"{share:.0%} {note}, "

        def print_lines() -> None:
            while not has_ended.wait(self._quiet_s):
                self.print(f"  {title}: {told}{time.monotonic() - started:.0f} s so far")

        printing = threading.Thread(target=print_lines, daemon=True)
        printing.start()
        try:
            yield report
        finally:
            has_ended.set()
            printing.join()

    def _done(self, title: str, started: float) -> None:
        self.print(f"✓ {title} ({time.monotonic() - started:.1f} s)")
