"""The demo's output: steps with their times, progress bars, answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[float, str], None]  # (share done, what is going on)


class Screen:
    """Prints a line for each finished step, and a bar or a spinner for the current one."""

    def __init__(self, console: Console | None = None) -> None:
        # No markup and no emoji: the models' answers are printed unchanged.
        self.console = console or Console(highlight=False, markup=False, emoji=False)

    def print(self, text: str = "", *, style: str | None = None) -> None:
        self.console.print(text, style=style, soft_wrap=True)

    @contextlib.contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Show a step of unknown length."""
        started = time.monotonic()
        with self.console.status(title) if self.console.is_terminal else contextlib.nullcontext():
            yield
        self._done(title, started)

    @contextlib.contextmanager
    def bar(self, title: str) -> Iterator[Report]:
        """Show a step that reports its progress."""
        started = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
        if not self.console.is_terminal:
            with self._milestones(title) as report:
                yield report
        else:
            with Progress(
                *columns, TimeElapsedColumn(), console=self.console, transient=True
            ) as progress:
                task = progress.add_task(title, total=1.0, note="")
                yield lambda share, note: progress.update(task, completed=share, note=note)
        self._done(title, started)

    @contextlib.contextmanager
    def _milestones(self, title: str) -> Iterator[Report]:
        """Print a line for each quarter, for a log file."""
        reached = 0

        def report(share: float, note: str) -> None:
            nonlocal reached
            quarter = int(share * 4)
            if reached < quarter < 4:
                reached = quarter
                self.print(f"  {title}: {share:.0%} {note}")

        yield report

    def _done(self, title: str, started: float) -> None:
        self.print(f"✓ {title} ({time.monotonic() - started:.1f} s)")
