"""A child process that answers one job with one JSON object: `python -m MODULE JOB.json`.

Standard output carries the answer and nothing else. Exit codes: 0 done · 1 a defect, or out of
memory · 2 the job, or what it is about, is wrong.
"""

from __future__ import annotations

import json
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.adapters.problems import AdapterProblems
from worker.child import take_stdout


def answer_job(read: Callable[[Path], Any], work: Callable[[Any], dict[str, Any]]) -> int:
    """Read the job, do it in its `memory_bytes`, and write the answer. -> the exit code."""
    out = take_stdout()
    try:
        if len(sys.argv) != 2:
            raise ValueError(f"usage: {sys.argv[0]} JOB.json")
        job = read(Path(sys.argv[1]))
        if job.memory_bytes is not None:
            # Read-only mappings, such as a base's files, do not count.
            resource.setrlimit(resource.RLIMIT_DATA, (job.memory_bytes, job.memory_bytes))
        told = work(job)
    except AdapterProblems as problems:
        sys.stderr.write(f"{problems}\n")
        return 2
    except Exception as error:
        traceback.print_exc()
        return 2 if isinstance(error, ValueError | OSError) else 1
    out.write(json.dumps(told, separators=(",", ":")))
    out.close()
    return 0
