"""Check a dataset's rows in a sealed process.

Imports no Django and no settings. No work is described; the one file is the JSONL, or a pipe that
carries it. The answer: {"num_rows", "problems": [[line, field, message]]}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from contract.process.line_reader import lines
from contract.process.sealed_process import serve
from contract.training.chat_rows import MAX_LINE_BYTES, lint_lines

_PIECE_BYTES = 1 << 18


def check_rows(work: dict[str, Any], files: Sequence[BinaryIO]) -> dict[str, Any]:
    """Return the answer for a file of rows."""
    found = lint_lines(lines(_pieces(files[0]), max_bytes=MAX_LINE_BYTES))
    problems = [[problem.line, problem.field, problem.message] for problem in found.problems]
    return {"num_rows": found.num_rows, "problems": problems}


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece


if __name__ == "__main__":
    serve(check_rows)
