"""Many of manage.py's commands in one process: to start takes longer than what most of them do.

    with Commands(env) as commands:
        commands.run("tenant_create", "--slug=acme", "--name=Acme")

`python -m demo.commands` is the process: a line of JSON in and a line of JSON out per command.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from demo.errors import StepFailed

ROOT = Path(__file__).parent.parent
_PIPE = subprocess.PIPE


class Commands:
    """A process that runs manage.py's commands, one after the other."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo.commands"],
            cwd=ROOT,
            env=dict(env),
            stdin=_PIPE,
            stdout=_PIPE,
            text=True,
        )

    def run(self, *argv: str, stdin: str = "") -> str:
        """Run one command and return its output. Raises StepFailed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        answer: dict[str, Any] = {"status": None, "output": ""}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"argv": argv, "stdin": stdin}) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline() or json.dumps(answer))
        if answer["status"] != 0:
            raise failed(argv[0], answer["status"], answer["output"])
        return str(answer["output"])

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def failed(command: str, status: int | None, output: str) -> StepFailed:
    """Make the error of a command that did not succeed."""
    return StepFailed(
        f"manage.py {command} ended with status {status}",
        details="\n".join(output.splitlines()[-25:]),
        advice="fix what it names; if .demo is from an older checkout, delete it",
    )


def _serve() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    commands, answers = sys.stdin, sys.stdout
    for line in commands:
        asked = json.loads(line)
        output = io.StringIO()
        sys.stdin = io.StringIO(asked["stdin"])
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = _run(asked["argv"])
        answers.write(json.dumps({"status": status, "output": output.getvalue()}) + "\n")
        answers.flush()


def _run(argv: list[str]) -> int:
    """Run one command as manage.py does. -> its exit status"""
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(["manage.py", *argv])
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    _serve()
