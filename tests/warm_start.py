"""Start processes of the control plane, and trainers, that have imported their code already.

`make test` starts some hundred of them, and most of a start is to import the same modules. One
process of each kind imports them once, for all lanes, and forks itself for each start: the new
process has its own argv, environment and standard streams, and reads the settings anew.
`python -m tests.warm_start SOCKET KIND` is that process; it ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Modules that do something with settings or the environment when they are imported.
LATER = ("asgi", "beat", "celery", "serve", "settings", "urls")
#: Those that tests start by `-m`.
MODULES = ("controlplane.serve", "tests.live_adapter", "tests.live_seed", "tests.live_warmth")
#: Programs that train, which tests start by `-m`.
TRAINERS = ("worker.train", "worker.primitives")
#: The worker with an echoing engine. The real one starts as it does for users.
WORKER = "tests.fake_worker"
SETTINGS = "DJANGO_SETTINGS_MODULE"
#: What torch and transformers read when they are imported begins so.
_READ_EARLY = ("OMP_", "TORCH", "PYTORCH", "CUDA", "TRITON", "HF_", "TRANSFORMERS", "TOKENIZERS")
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
    """Starts processes of a kind in KINDS from one that forks."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._address = ""
        self._server: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start the process that forks, unless it was: before lanes fork, they share it.

        It ends when the last of them does, which then closes its standard input.
        """
        if self._server is None:
            self._address = f"{tempfile.mkdtemp(prefix='lorikeet-warm-')}/socket"
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_start", self._address, self._kind],
                # One thread, as a fork has: who imports torch starts none for its sums.
                env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        """Of the socket, which answers."""
        self._connect().close()
        return self._address

    def popen(
        self, argv: Sequence[str], env: Mapping[str, str], *streams: int, cwd: Path = ROOT
    ) -> WarmProcess:
        """Run `python ARGV` in a session of its own.

        streams  its standard output, error and, unless it has none, input
        """
        connection = self._connect()
        asked = {"argv": list(argv), "env": dict(env), "cwd": str(cwd)}
        request = json.dumps(asked).encode()
        header = len(request).to_bytes(4, "big")
        socket.send_fds(connection, [header], list(streams))
        connection.sendall(request)
        return WarmProcess(connection)

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        stdin: str = "",
        cwd: Path = ROOT,
        timeout_s: float | None = None,
    ) -> tuple[int, str, str]:
        """Run `python ARGV` to its end; return the exit status and what it wrote.

        Raises subprocess.TimeoutExpired, and kills it then.
        """
        with (
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
            tempfile.TemporaryFile() as given,
        ):
            given.write(stdin.encode())
            given.seek(0)
            streams = (stdout.fileno(), stderr.fileno(), given.fileno())
            process = self.popen(argv, env, *streams, cwd=cwd)
            try:
                status = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(file.read().decode())
        return status, texts[0], texts[1]

    def _connect(self) -> socket.socket:
        self.begin()
        deadline = time.monotonic() + 120
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._address)
            except OSError:
                connection.close()
                assert time.monotonic() < deadline, "the process that forks does not answer"
                time.sleep(0.05)
            else:
                return connection


warm_start = WarmStart("controlplane")
warm_workers = WarmStart("worker")
warm_trainers = WarmStart("trainer")
warm_commands = WarmStart("cli")


def can_be_warm(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether the process is one of the control plane, with the settings of this session.

    Celery, and what counts in several processes, set the environment before they import anything.
    """
    is_ours = argv[0] in ("-c", "manage.py") or argv[1] in MODULES
    is_same = env.get(SETTINGS) == os.environ.get(SETTINGS)
    return is_ours and is_same and "LORIKEET_METRICS_PORT" not in env


def can_trainer_be_warm(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether it is a program that trains, with what its libraries read as in this session."""
    is_same = all(
        env.get(name) == os.environ.get(name)
        for name in {*env, *os.environ}
        if name.startswith(_READ_EARLY) and name != "OMP_NUM_THREADS"
    )
    return argv[1] in TRAINERS and is_same and env.get("OMP_NUM_THREADS") == "1"


def _serve(listener: socket.socket) -> list[str] | None:
    """Fork for each request. Returns in a new process its argv, and None when all is over."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = listener.accept()
        header, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        if not header:  # it was asked whether it answers
            connection.close()
            continue
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
        _kill_with_its_owner(pid, connection)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % status)
        os._exit(0)
    os.close(begin_write)
    os.read(begin_read, 1)
    os.close(begin_read)
    connection.close()
    os.setsid()
    if len(descriptors) == 2:
        descriptors = [*descriptors, os.open(os.devnull, os.O_RDONLY)]
    for number, descriptor in zip((1, 2, 0), descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    argv: list[str] = asked["argv"]
    return argv


def _kill_with_its_owner(pid: int, connection: socket.socket) -> None:
    """Return when the process has ended; kill it when who asked for it has."""
    ended = os.pidfd_open(pid)
    while ended not in select.select([ended, connection], [], [])[0]:
        if not connection.recv(1):
            os.kill(pid, signal.SIGKILL)
            break
    os.close(ended)


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


def _import_controlplane() -> None:
    import django

    django.setup()
    for path in sorted((ROOT / "controlplane").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if not {"migrations", "commands", "__init__", *LATER} & set(parts[1:]):
            importlib.import_module(".".join(parts))


def _import_workers() -> None:
    for name in ("worker.serving.service", "worker.engine_process.process", "tests.fakes"):
        importlib.import_module(name)


def _import_trainers() -> None:
    """What a training of the tests' tiny models imports, also late."""
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # imported already
    for package in ("training", "inspection", "text"):
        for path in sorted((ROOT / "worker" / package).glob("*.py")):
            importlib.import_module(f"worker.{package}.{path.stem}")
    for name in (
        *("peft.tuners.lora.model", "transformers.models.llama.modeling_llama"),
        *("torch.optim", "safetensors.torch", "transformers.trainer"),
    ):
        importlib.import_module(name)


def forget_settings() -> None:
    """Read the settings from the new environment; nothing was connected with the old ones."""
    from django import conf
    from django.core.cache import caches
    from django.db import connections

    sys.modules.pop(os.environ[SETTINGS], None)
    conf.settings._wrapped = conf.empty
    assert all(made.connection is None for made in connections.all(initialized_only=True))
    for handler in (connections, caches):
        for alias in handler.settings:
            with contextlib.suppress(AttributeError):  # nobody asked for it
                del handler[alias]
        handler._settings = None
        handler.__dict__.pop("settings", None)


def _import_cli() -> None:
    """What the command line imports, but nothing of its own: it looks at its terminal then."""
    sys.path.insert(0, str(ROOT / "cli"))
    for path in sorted((ROOT / "cli" / "lorikeet_cli").rglob("*.py")):
        parts = path.relative_to(ROOT / "cli").with_suffix("").parts
        if parts[-1] != "__main__":
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "lorikeet_cli"]:
        del sys.modules[name]


KINDS = {
    "cli": _import_cli,
    "controlplane": _import_controlplane,
    "worker": _import_workers,
    "trainer": _import_trainers,
}


def main() -> None:
    address, kind = sys.argv[1:]
    gc.disable()
    KINDS[kind]()
    gc.collect()
    gc.freeze()
    gc.enable()
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        argv = _serve(listener)
    if argv is None:
        shutil.rmtree(Path(address).parent)
        return
    if kind == "controlplane":
        forget_settings()
    _run(argv)


if __name__ == "__main__":
    main()
