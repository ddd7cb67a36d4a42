"""The command line as a person or a script runs it: a process of its own, in a home of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.warm_start import warm_commands

ROOT = Path(__file__).parent.parent.parent
COMMAND = (sys.executable, "-m", "lorikeet_cli")
TIMEOUT_S = 120


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


@dataclasses.dataclass(frozen=True)
class Cli:
    """Runs commands; what they save is under `home`."""

    home: Path
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def run(self, *argv: str, stdin: str = "", **env: str) -> Done:
        """A command, as a fork of a process that has imported what it imports.

        With a path of modules of its own, in a terminal, by `start` and in the documentation's
        examples it starts as it does for users.
        """
        if "PYTHONPATH" in env:
            return self._run([*COMMAND, *argv], stdin, env)
        command = [*COMMAND[1:], *argv]
        own = self.environment(**env)
        said = warm_commands.run(command, own, stdin=stdin, cwd=self.home, timeout_s=TIMEOUT_S)
        return Done(*said)

    def run_python(self, code: str, **env: str) -> Done:
        """A piece of code in place of the command."""
        return self._run([sys.executable, "-c", code], "", env)

    def _run(self, argv: list[str], stdin: str, env: Mapping[str, str]) -> Done:
        done = subprocess.run(
            argv,
            env=self.environment(**env),
            input=stdin,
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def json(self, *argv: str, **options: Any) -> Any:
        """The document that a command answers a script with. It has to succeed."""
        return self.run(*argv, "--output", "json", **options).json

    def start(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        """A command that goes on; its answers are read from `stdout`."""
        return subprocess.Popen(
            [*COMMAND, *argv],
            env=self.environment(**env),
            cwd=self.home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_in_terminal(
        self, *argv: str, typed: Mapping[str, str] | None = None, **env: str
    ) -> tuple[int, str]:
        """-> the exit code, and all that the terminal showed.

        typed  what is typed once the terminal shows each of these words
        """
        primary, secondary = pty.openpty()
        process = subprocess.Popen(
            [*COMMAND, *argv],
            env=self.environment(TERM="xterm", COLUMNS="120", **env),
            cwd=self.home,
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            start_new_session=True,
        )
        os.close(secondary)
        killer = threading.Timer(TIMEOUT_S, process.kill)
        killer.start()
        shown, waiting = "", dict(typed or {})
        with contextlib.suppress(OSError):  # Linux's end of a terminal
            while piece := os.read(primary, 4096):
                shown += piece.decode(errors="replace")
                for word in [word for word in waiting if word in shown]:
                    time.sleep(0.1)  # what is typed before it reads in secret is dropped
                    os.write(primary, f"{waiting.pop(word)}\n".encode())
        code = process.wait()
        killer.cancel()
        os.close(primary)
        return code, shown

    def environment(self, **env: str) -> dict[str, str]:
        """This process's environment without any account in it, and with `env`."""
        own = {name: text for name, text in os.environ.items() if not name.startswith("LORIKEET_")}
        own |= {"HOME": str(self.home), "PYTHONPATH": str(ROOT / "cli"), "NO_PROXY": "*"}
        for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME"):
            own.pop(name, None)
        return {**own, **self.env, **env}

    @property
    def config(self) -> Path:
        return self.home / ".config" / "lorikeet" / "config.toml"
