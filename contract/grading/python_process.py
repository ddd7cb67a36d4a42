"""Run a stranger's `grade(sample, item)` over samples, in a sealed process.

The work is {"source"}; the one file has a line for each sample, {"sample", "item"}. The answer:
{"scores": [number or null], "error": the first error or ""}, or {"refused": true} where the kernel
has no seccomp: a stranger's code could send signals there. The modules of `_MODULES` can be
imported: others are files, which cannot be opened any more.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

from contract.process.sealed_process import serve

_MODULES = (
    "bisect", "collections", "datetime", "decimal", "difflib", "fractions", "functools", "heapq",
    "itertools", "json", "math", "operator", "re", "statistics", "string", "textwrap", "typing",
    "unicodedata",
)  # fmt: skip
_MAX_ERROR_CHARS = 200


class _Nowhere:
    """A stream that keeps nothing of what a grader prints."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


def grade_samples(work: dict[str, Any], files: Sequence[BinaryIO]) -> dict[str, Any]:
    """Return the answer for a source and its samples."""
    if _may_signal():
        return {"refused": True}
    lines = files[0].read().splitlines()
    nowhere: Any = _Nowhere()
    sys.stdout = sys.stderr = nowhere
    scope: dict[str, Any] = {"__name__": "grader"}
    error = ""
    try:
        exec(compile(work["source"], "grader", "exec"), scope)  # sealed
    except BaseException as raised:
        return {"scores": [None] * len(lines), "error": _told(raised)}
    scores: list[float | None] = []
    for line in lines:
        try:
            given = json.loads(line)
            score = float(scope["grade"](given["sample"], given["item"]))
            if not math.isfinite(score):
                raise ValueError(f"{score} is not finite")
            scores.append(score)
        except BaseException as raised:
            scores.append(None)
            error = error or _told(raised)
    return {"scores": scores, "error": error}


def _may_signal() -> bool:
    """Return whether no filter of system calls is there, which refuses signals."""
    try:
        os.kill(os.getpid(), 0)
    except PermissionError:
        return False
    return True


def _told(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
    except BaseException:
        return "an error that cannot be written"


if __name__ == "__main__":
    for name in _MODULES:
        importlib.import_module(name)
    serve(grade_samples)
