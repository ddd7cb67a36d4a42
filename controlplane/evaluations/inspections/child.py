"""Run `python -m worker.inspect_adapter` as a child process. Does not use the database.

Only the child imports torch and parses the adapter's weights. It has no secrets, a limit on its
memory and its time, and its answer is bounded.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contract.adapters.inspection import MAX_ANSWER_BYTES, InspectJob
from controlplane.training.last_lines import last_lines

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
#: Memory of Python, torch and transformers, with their threads' stacks.
_OWN_BYTES = 3 << 30


class InspectionFailed(Exception):
    """Raised when the child ended without an answer; it says nothing about the adapter."""


def memory_limit(base_bytes: int, adapter_bytes: int) -> int:
    """Return the most memory for data that the child may take.

    base_bytes  of the base model's files, with two bytes per weight or more: in fp32 twice as many
    """
    return _OWN_BYTES + 3 * base_bytes + 8 * adapter_bytes


def run_inspector(
    job: InspectJob, folder: Path, *, environment: Mapping[str, str], cwd: Path | None = None
) -> Any:
    """Return the child's answer. Raises InspectionFailed.

    folder       scratch space of this inspection
    environment  the child's whole environment
    cwd          the folder of the child's modules; None: the folder of this process
    """
    job_path, stderr_path = folder / "job.json", folder / "stderr.log"
    job.write(job_path)
    with stderr_path.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "worker.inspect_adapter", str(job_path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=cwd,
            env={**environment, "HF_HUB_OFFLINE": "1"},  # a config may name a repository
        )
    try:
        answer = _read(child, time.monotonic() + TIMEOUT_S)
        returncode = child.wait(10)
    except subprocess.TimeoutExpired as error:
        raise InspectionFailed("The inspector's child did not exit.") from error
    finally:
        assert child.stdout is not None
        child.stdout.close()
        child.kill()
        child.wait()
    if returncode != 0:
        told = {"exit_code": returncode, "last_lines": last_lines(stderr_path)}
        log.warning("an inspection failed", extra=told)
        raise InspectionFailed(f"The inspector's child ended with exit code {returncode}.")
    try:
        return json.loads(answer)
    except ValueError as error:
        raise InspectionFailed("The inspector's child printed no JSON.") from error


def _read(child: subprocess.Popen[bytes], deadline: float) -> bytes:
    """Read the child's output to its end. Raises InspectionFailed."""
    assert child.stdout is not None
    answer = b""
    while True:
        wait_s = deadline - time.monotonic()
        if wait_s <= 0 or not select.select([child.stdout], [], [], wait_s)[0]:
            raise InspectionFailed(f"The inspector's child took longer than {TIMEOUT_S:g} s.")
        piece = os.read(child.stdout.fileno(), 64 << 10)
        if not piece:
            return answer
        answer += piece
        if len(answer) > MAX_ANSWER_BYTES:
            raise InspectionFailed("The inspector's child printed too much.")
