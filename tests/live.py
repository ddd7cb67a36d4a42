"""Real processes for tests: web servers, workers and accountants over the embedded servers.

They have a database, a Redis database and a pool of their own, apart from the tests that run
inside pytest's transactions.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import redis

from contract.messages import protocol
from demo.ports import choose_ports
from demo.stack import EmbeddedStack
from tests.database import migrated_database, operator_url
from tests.fakes import write_fake_base
from tests.warm_start import WORKER, WarmProcess, can_be_warm, warm_start, warm_workers

ROOT = Path(__file__).parent.parent
POOL = "live"
START_TIMEOUT_S = 120.0


def wait_for(condition: Callable[[], Any], *, timeout_s: float = 15.0, what: str = "it") -> Any:
    """What `condition` returns once that is true. Fails the test when it stays false.

    It is looked at less and less often, at least ten times a second: to look is work for a server.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.02
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(pause_s)
        pause_s = min(0.1, 1.3 * pause_s)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")


def started(
    argv: list[str], env: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes] | WarmProcess:
    """A child in its own session."""
    if can_be_warm(argv, env):
        return warm_start.popen(argv, env, output.fileno(), output.fileno())
    if argv[:2] == ["-m", WORKER]:
        return warm_workers.popen(argv, env, output.fileno(), output.fileno())
    return subprocess.Popen(
        [sys.executable, *argv],
        env=env,
        cwd=ROOT,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def run_to_end(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Standard output of a child that should succeed."""
    if can_be_warm(argv, env):
        status, stdout, stderr = warm_start.run(argv, env)
    else:
        command = [sys.executable, *argv]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        status, stdout, stderr = done.returncode, done.stdout, done.stderr
    assert status == 0, stderr
    return stdout


class Process:
    """A child in its own session, with its output in a file."""

    def __init__(self, name: str, argv: list[str], env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._popen = started(argv, {**os.environ, **env}, output)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        return self._popen.poll()

    def cpu_s(self) -> float:
        """Seconds of the processor that its threads have had."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """kill -9, and wait."""
        self._popen.kill()
        self._popen.wait()

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def stop(self, timeout_s: float = 15.0) -> int:
        """SIGTERM, then wait. -> the exit status."""
        if self._popen.poll() is None:
            self._popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._popen.wait(timeout_s)
        self.kill()
        raise AssertionError(f"{self.name} did not stop; see {self.log}")

    def end(self) -> None:
        """Be sure that nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tenant:
    id: str
    key: str
    #: A key that was revoked.
    revoked_key: str
    adapter: str


class LiveStack:
    """The environment of the live processes, and how to start each kind."""

    def __init__(
        self, env: Mapping[str, str], folder: Path, *, database: str = "lorikeet_live"
    ) -> None:
        self.folder = folder
        self.pool = POOL
        self.base = write_fake_base(folder / "base")
        parts = urlsplit(env["REDIS_URL"])
        self.redis_url = urlunsplit(parts._replace(path="/5"))
        database_env = migrated_database(env, database)
        #: For looking at every tenant's rows.
        self.database_url = operator_url(database_env["DATABASE_URL"])
        self.env = {
            **env,
            **database_env,
            "REDIS_URL": self.redis_url,
            "LORIKEET_POOL": POOL,
            "LORIKEET_BASE_MODEL": str(self.base),
            "LORIKEET_DEVICE": "cpu",  # whatever .env.example says, which mypy wants in a shell
            "PYTHONUNBUFFERED": "1",
        }
        self.redis = redis.Redis.from_url(self.redis_url, protocol=2)
        self.redis.flushdb()
        self._processes: list[Process] = []
        self.tenants = {
            name: Tenant(**fields)
            for name, fields in json.loads(self.run("-m", "tests.live_seed")).items()
        }

    def with_pool(self, pool: str) -> LiveStack:
        """The same servers and tenants, but processes that know nothing of other pools'."""
        other = copy.copy(self)
        other.pool = pool
        other.env = {**self.env, "LORIKEET_POOL": pool}
        return other

    def run(self, *argv: str) -> str:
        """A command's standard output."""
        return run_to_end(argv, {**os.environ, **self.env})

    def start(self, name: str, *argv: str, **env: str) -> Process:
        process = Process(name, list(argv), {**self.env, **env}, self._log_of(name))
        self._processes.append(process)
        return process

    def named(self, prefix: str) -> list[Process]:
        """The processes, of all pools, whose names begin so."""
        return [process for process in self._processes if process.name.startswith(prefix)]

    def start_web(
        self,
        name: str = "web",
        *,
        application: str = "controlplane.asgi:application",
        **env: str,
    ) -> tuple[Process, str]:
        """A gateway and its address."""
        (port,) = choose_ports(1)
        url = f"http://127.0.0.1:{port}"
        process = self.start(
            name,
            *("-m", "controlplane.serve", application, f"--port={port}"),
            *("--no-access-log", "--timeout-graceful-shutdown=2"),
            **env,
        )

        def answers() -> bool:
            assert process.exit_code is None, process.log.read_text()
            with contextlib.suppress(OSError):
                return bool(urllib.request.urlopen(f"{url}/healthz", timeout=2).status == 200)
            return False

        wait_for(answers, timeout_s=START_TIMEOUT_S, what="the web server's start")
        return process, url

    def start_worker(
        self,
        worker_id: str,
        *,
        step_s: float | None = 0.0,
        load_s: float = 0.0,
        max_running: int = 64,
        base: Path | None = None,
        wait: bool = True,
        **env: str,
    ) -> Process:
        """A worker; returns when it is registered.

        step_s  of the echoing engine; None: the real engine, for a `base` with weights
        load_s  that the echoing engine takes to load
        max_running  requests that get a token in one of its steps
        """
        before = self.heartbeat(worker_id)
        argv = (
            ["-m", "worker"]
            if step_s is None
            else ["-m", WORKER, str(step_s), str(load_s), str(max_running)]
        )
        process = self.start(
            worker_id,
            *argv,
            LORIKEET_WORKER_ID=worker_id,
            LORIKEET_ADAPTER_DIR=str(self.folder / "adapters" / worker_id),
            LORIKEET_BASE_MODEL=str(base or self.base),
            **env,
        )

        def is_up() -> bool:
            assert process.exit_code is None, process.log.read_text()
            now = self.heartbeat(worker_id)
            is_new = now is not None and (before is None or now.boot_id != before.boot_id)
            return is_new and now is not None and not now.loading

        if wait:
            timeout_s = START_TIMEOUT_S if step_s is not None else 120
            wait_for(is_up, timeout_s=timeout_s, what=f"the start of {worker_id}")
        return process

    def start_accountant(self, name: str = "accountant") -> Process:
        return self._start_command("accountant", name)

    def start_batch_runner(self, name: str = "batch-runner", **env: str) -> Process:
        return self._start_command("batch_runner", name, **env)

    def _start_command(self, command: str, name: str, **env: str) -> Process:
        """A process of manage.py; returns when it can be told to stop."""
        log = self._log_of(name)
        before = log.stat().st_size if log.exists() else 0
        process = self.start(name, "manage.py", command, **env)

        def is_up() -> bool:
            written = log.read_bytes()[before:]
            assert process.exit_code is None, written.decode()
            return b" is up" in written

        wait_for(is_up, timeout_s=START_TIMEOUT_S, what=f"the start of {name}")
        return process

    def _log_of(self, name: str) -> Path:
        return self.folder / f"{self.pool}-{name}.log"

    def heartbeat(self, worker_id: str) -> protocol.Heartbeat | None:
        payload = self.redis.hget(protocol.worker_key(self.pool, worker_id), "m")
        return protocol.Heartbeat.decode(payload) if payload else None

    def forget_worker(self, worker_id: str) -> None:
        """Remove a killed worker from the registry, as time would."""
        self.redis.zrem(protocol.workers_key(self.pool), worker_id)
        self.redis.delete(protocol.worker_key(self.pool, worker_id))

    def usage_rows(self, request_id: str) -> list[dict[str, Any]]:
        """The usage records of a request; there should be one in the end."""
        with psycopg.connect(self.database_url, row_factory=psycopg.rows.dict_row) as connection:
            return connection.execute(
                "select * from usage_usagerecord where request_id = %s", (request_id,)
            ).fetchall()

    def usage_row(self, request_id: str) -> dict[str, Any]:
        """The one usage record of a request, waited for."""
        rows = wait_for(lambda: self.usage_rows(request_id), what=f"usage of {request_id}")
        assert len(rows) == 1
        return rows[0]

    def close(self) -> None:
        for process in self._processes:
            process.end()
        self.redis.close()


@pytest.fixture(scope="session")
def live(stack: EmbeddedStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """Tenants, keys and adapters for real processes; they are started by the tests."""
    with live_stack(stack.env, tmp_path_factory.mktemp("live")) as made:
        yield made


@contextlib.contextmanager
def live_stack(
    env: Mapping[str, str], folder: Path, *, database: str = "lorikeet_live"
) -> Iterator[LiveStack]:
    stack = LiveStack(env, folder, database=database)
    try:
        yield stack
    finally:
        stack.close()
