"""Progress on standard error: a bar in a terminal, nothing else where there is none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Bar(Protocol):
    """Progress of one task, with a short status text."""

    def show(self, done: float, total: float | None = None, note: str = "") -> None: ...


class _NoBar:
    def show(self, done: float, total: float | None = None, note: str = "") -> None:
        pass


def is_shown() -> bool:
    return sys.stderr.isatty()


@contextlib.contextmanager
def bar(title: str, *, total: float | None, is_bytes: bool = False) -> Iterator[Bar]:
    """Show a bar while the block runs; without a `total` it only moves."""
    if not is_shown():
        yield _NoBar()
        return
    # Imported here: scripts, which see no bars, start sooner.
    from rich import progress
    from rich.console import Console

    columns: list[progress.ProgressColumn] = [
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
    ]
    if is_bytes:
        columns += [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()]
    else:
        columns += [progress.TaskProgressColumn()]
    columns += [
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[note]}", markup=False),
    ]
    shown = progress.Progress(*columns, console=Console(stderr=True))
    with shown:
        task = shown.add_task(title, total=total, note="")

        class _RichBar:
            def show(self, done: float, total: float | None = None, note: str = "") -> None:
                shown.update(task, completed=done, total=total, note=note)

        yield _RichBar()
