"""Programs that train, as processes of their own: what tests need of `subprocess.Popen`.

To import torch, transformers and PEFT takes five seconds of a processor, so most of them are forks
of a process that has; `tests/worker/training/test_train.py` and `tests/worker/test_train_many.py`
start some as users do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import pytest

from tests.warm_start import TRAINERS, can_trainer_be_warm, warm_trainers

ROOT = Path(__file__).parent.parent


def train_in_float32(patch: pytest.MonkeyPatch) -> None:
    """Also where the processor multiplies bfloat16, which rounds too coarsely to compare losses."""
    import torch

    patch.setattr("worker.training.device.training_dtype", lambda: torch.float32)


class Trainer:
    """A started trainer; its streams are pipes of text."""

    def __init__(self, argv: Sequence[str]) -> None:
        read_in, write_in = os.pipe()
        read_out, write_out = os.pipe()
        read_error, write_error = os.pipe()
        theirs = (write_out, write_error, read_in)
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        assert can_trainer_be_warm(argv, env)
        self._process = warm_trainers.popen(argv, env, *theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin: IO[str] | None = os.fdopen(write_in, "w")
        self.stdout: IO[str] | None = os.fdopen(read_out)
        self.stderr: IO[str] | None = os.fdopen(read_error)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it writes until it ends. Raises subprocess.TimeoutExpired."""
        assert self.stdin is not None and self.stdout is not None and self.stderr is not None
        self.stdin.close()
        with ThreadPoolExecutor(2) as pool:
            texts = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            return texts[0].result(), texts[1].result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in (self.stdout, self.stderr, self.stdin):
            if stream is not None:  # a test has closed it
                stream.close()
        if error is not None:
            self.kill()
        self.wait()


def start_trainer(
    module: str, *argv: str, is_real: bool = False
) -> Trainer | subprocess.Popen[str]:
    """Run `python -m MODULE ARGV`.

    is_real  whether it is started as users start it
    """
    command = ["-m", module, *argv]
    if not is_real:
        return Trainer(command)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


#: What a fork runs where Python would; anything else is Python's.
WARM = (*TRAINERS, "worker.inspect_adapter", "worker.dataset_report")
#: In each Python process that finds it: what its children are started with.
_SITE = """
import sys
if "celery" in sys.orig_argv:
    sys.executable = {python!r}
"""


def warm_python(folder: Path) -> Path:
    """Make a program that runs what Python would, and what is in WARM as a warm fork.

    The shell gives it no variable of its own: tests look at what a trainer's environment has.
    """
    python = folder / "python"
    client = ROOT / "tests" / "warm_client.py"
    warm = f'exec "{sys.executable}" -S "{client}" {warm_trainers.address} "$@"'
    cold = f'exec "{sys.executable}" "$@"'
    python.write_text(
        f'#!/bin/sh\nunset PWD\ncase "$2" in\n{"|".join(WARM)}) {warm};;\n*) {cold};;\nesac\n'
    )
    python.chmod(0o755)
    return python


def warm_site(folder: Path) -> Path:
    """Make a folder for PYTHONPATH, by which Celery's processes start their children warm."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITE.format(python=str(warm_python(folder))))
    return site
