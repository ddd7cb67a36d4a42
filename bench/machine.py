"""Describes where and when a result was measured, and writes it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def environment(program: str) -> dict[str, Any]:
    """Return machine, versions, load and command; call it first, so that the load is other work's.

    program  for example `bench.cpu`
    """
    return {
        "command": " ".join(["python -m", program, *sys.argv[1:]]),
        "commit": commit(),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """Return the measured commit, or LORIKEET_COMMIT if the tree was copied without its .git."""
    told = os.environ.get("LORIKEET_COMMIT")
    if told:
        return told
    try:
        run = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        return run.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def write_result(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON with one line per field, and one per row of a list.

    The file is replaced in one step, so it is always complete.
    """
    part = path.with_name(path.name + ".part")
    part.write_text(_lines(report, " ", is_report=True) + "\n")
    part.replace(path)


def _lines(value: Any, indent: str, *, is_report: bool = False) -> str:
    """Return JSON; only what contains rows is spread over lines."""
    if isinstance(value, dict) and (is_report or _has_rows(value)):
        parts = [f"{json.dumps(key)}: {_lines(each, indent + ' ')}" for key, each in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        parts = [json.dumps(each) for each in value]
        opening, closing = "[", "]"
    else:
        return json.dumps(value)
    lines = f",\n{indent}".join(parts)
    return f"{opening}\n{indent}{lines}\n{indent[:-1]}{closing}"


def _has_rows(fields: dict[str, Any]) -> bool:
    """Return whether a value has fields of its own, or is a list of rows."""
    return any(
        isinstance(each, dict)
        or (isinstance(each, list) and any(isinstance(row, dict) for row in each))
        for each in fields.values()
    )
