"""The last lines of a trainer's output: for the log, and the part that its tenant may read.

A trainer has one tenant's run and no secret in its environment, so a tenant may see the trace of
its own run. It does not see the folders of the machine, nor what looks like a secret.
"""

from __future__ import annotations

import re
from pathlib import Path

from contract.process.log_secrets import masked, visible

MAX_LINES = 40
_MAX_LINE_CHARS = 300
_READ_BYTES = 32 * 1024
#: Colours and cursor movements of progress bars.
_TERMINAL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
_FOLDERS = re.compile(r"(?<![\w.:/])(?:/[^\s/\"':,()]+)*/(?=[^\s/\"':,()])")
_TRACE = "Traceback (most recent call last):"


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a file, without control characters and secrets."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _READ_BYTES))
        text = file.read().decode(errors="replace")
    if size > _READ_BYTES:
        text = text.partition("\n")[2]  # the first line is cut
    lines = [_cleaned(line) for line in text.split("\n")]
    return [line for line in lines if line][-MAX_LINES:]


def _cleaned(line: str) -> str:
    # Only the last state of a progress bar that was drawn over.
    line = _TERMINAL.sub("", line).rstrip("\r").rpartition("\r")[2].rstrip()
    return masked(visible(line))[:_MAX_LINE_CHARS]


def for_tenant(message: str, lines: list[str], *, max_chars: int) -> str:
    """Return the reason of a failure with the end of the trace, if the lines have one."""
    said = _without_folders(visible(masked(message)))[: max_chars // 2]
    starts = [number + 1 for number, line in enumerate(lines) if line == _TRACE]
    # A long trace's first line is not among the last lines.
    starts = starts or [n for n, line in enumerate(lines) if line.startswith('  File "')][:1]
    if not starts:
        return said
    trace = [_without_folders(line) for line in lines[starts[-1] :]]
    room = max_chars - len(said) - 2
    while trace and len("\n".join(trace)) > room:
        del trace[0]  # the cause is at the end
    return "\n\n".join(part for part in (said, "\n".join(trace)) if part)


def _without_folders(text: str) -> str:
    return _FOLDERS.sub("", text)
