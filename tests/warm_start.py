"""Start processes of the control plane that have imported its code already.

`make test` starts some hundred of them, and most of a start is to import the same modules. One
process of each lane imports them once, and forks itself for each start: the new process has its
own argv, environment, working folder and output, and reads the settings anew.
`python -m tests.warm_start SOCKET` is that process; it ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

import django
from django import conf
from django.core.cache import caches
from django.db import connections

ROOT = Path(__file__).parent.parent
#: Modules that do something with settings or the environment when they are imported.
LATER = ("asgi", "beat", "celery", "serve", "settings", "urls")
#: Those that tests start by `-m`.
MODULES = ("controlplane.serve", "tests.live_adapter", "tests.live_seed", "tests.live_warmth")
SETTINGS = "DJANGO_SETTINGS_MODULE"
_MAX_REQUEST_BYTES = 1 << 20


class WarmProcess:
    """A started process: what tests need of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._status: int | None = None
        self.pid = int(self._line())

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        if self._status is None and select.select([self._connection], [], [], 0)[0]:
            self._status = int(self._line())
            self._connection.close()
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        if self._status is None:
            select.select([self._connection], [], [], timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _line(self) -> str:
        text = b""
        while not text.endswith(b"\n"):
            piece = self._connection.recv(1)
            assert piece, "the process that forks is gone"
            text += piece
        return text.decode()


class WarmStart:
    """Starts processes; the one that forks starts with the first of them."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="lorikeet-warm-")
        self._address = f"{self._folder.name}/socket"
        self._server: subprocess.Popen[bytes] | None = None

    def popen(
        self, argv: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int
    ) -> WarmProcess:
        """Run `python ARGV`, a process of the control plane, in a session of its own."""
        connection = self._connect()
        request = json.dumps({"argv": list(argv), "env": dict(env)}).encode()
        header = len(request).to_bytes(4, "big")
        socket.send_fds(connection, [header], [stdout, stderr])
        connection.sendall(request)
        return WarmProcess(connection)

    def run(self, argv: Sequence[str], env: Mapping[str, str]) -> tuple[int, str, str]:
        """Run `python ARGV` to its end; return the exit status and what it wrote."""
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = self.popen(argv, env, stdout.fileno(), stderr.fileno())
            status = process.wait()
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(file.read().decode())
        return status, texts[0], texts[1]

    def _connect(self) -> socket.socket:
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_start", self._address],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._address)
            except OSError:
                connection.close()
                assert time.monotonic() < deadline and self._server.poll() is None
                time.sleep(0.05)
            else:
                return connection


#: Of this session, whose end closes the standard input of the process that forks.
warm_start = WarmStart()


def can_be_warm(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the process is one of the control plane, with the settings of this session.

    Celery, and what counts in several processes, set the environment before they import anything.
    """
    is_ours = argv[0] in ("-c", "manage.py") or argv[1] in MODULES
    is_same = env.get(SETTINGS) == os.environ.get(SETTINGS)
    return is_ours and is_same and "LORIKEET_METRICS_PORT" not in env


def _serve(listener: socket.socket) -> list[str] | None:
    """Fork for each request. Returns in a new process its argv, and None when all is over."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        header, descriptors, _, _ = socket.recv_fds(connection, 4, 2)
        if os.fork() == 0:
            listener.close()
            return _keep(connection, int.from_bytes(header, "big"), descriptors)
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(connection: socket.socket, num_bytes: int, descriptors: list[int]) -> list[str]:
    """Fork the process that was asked for, tell its pid and in the end its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    assert num_bytes <= _MAX_REQUEST_BYTES
    request = b""
    while len(request) < num_bytes:
        request += connection.recv(num_bytes - len(request))
    asked = json.loads(request)
    # Its pid is told before it runs anything.
    begin_read, begin_write = os.pipe()
    pid = os.fork()
    if pid:
        for descriptor in (*descriptors, begin_read):
            os.close(descriptor)
        connection.sendall(b"%d\n" % pid)
        os.close(begin_write)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % status)
        os._exit(0)
    os.close(begin_write)
    os.read(begin_read, 1)
    os.close(begin_read)
    connection.close()
    os.setsid()
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(asked["env"])
    argv: list[str] = asked["argv"]
    return argv


def _run(argv: list[str]) -> None:
    """What `python ARGV` does."""
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.orig_argv = [sys.executable, *argv]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(argv[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def _import_all() -> None:
    django.setup()
    for path in sorted((ROOT / "controlplane").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if not {"migrations", "commands", "__init__", *LATER} & set(parts[1:]):
            importlib.import_module(".".join(parts))


def forget_settings() -> None:
    """Read the settings from the new environment; nothing was connected with the old ones."""
    sys.modules.pop(os.environ[SETTINGS], None)
    conf.settings._wrapped = conf.empty
    assert all(made.connection is None for made in connections.all(initialized_only=True))
    for handler in (connections, caches):
        for alias in handler.settings:
            with contextlib.suppress(AttributeError):  # nobody asked for it
                del handler[alias]
        handler._settings = None
        handler.__dict__.pop("settings", None)


def main() -> None:
    gc.disable()
    _import_all()
    gc.collect()
    gc.freeze()
    gc.enable()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(16)
        argv = _serve(listener)
    if argv is not None:
        forget_settings()
        _run(argv)


if __name__ == "__main__":
    main()
