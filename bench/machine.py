"""Describes where and when a result was measured."""

from __future__ import annotations

import importlib.metadata
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
