"""A PostgreSQL and a Redis of a test's own, which it may stop, freeze and cut off."""

from __future__ import annotations

import contextlib
import secrets
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from demo.ports import choose_ports
from demo.processes import ChildProcess
from demo.servers import HOST, Postgres, Redis
from demo.stack import APPLICATION, DATABASE

START_TIMEOUT_S = 60.0


class OwnServers:
    """Both servers; `env` leads to them, and for the rest to the session's."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        port, redis_port = choose_ports(2)
        self._password = secrets.token_hex(8)
        run = folder / "run"
        # Durable: what was committed is there after an immediate shutdown.
        self._postgres = Postgres(folder, port=port, password=self._password, durable=True, run=run)
        self._redis = Redis(folder, port=redis_port, password="", run=run)
        place = f"{self._password}@{HOST}:{port}/{DATABASE}"
        self.env = {
            **env,
            "DATABASE_URL": f"postgresql://{APPLICATION}:{place}",
            "DATABASE_OWNER_URL": f"postgresql://{DATABASE}:{place}",
            "REDIS_URL": f"redis://{HOST}:{redis_port}/0",
            "CELERY_BROKER_URL": f"redis://{HOST}:{redis_port}/1",
        }

    @property
    def _processes(self) -> tuple[ChildProcess, ChildProcess]:
        return self._postgres.process, self._redis.process

    def start(self) -> None:
        for server in (self._postgres, self._redis):
            server.prepare()
            server.process.start()
        for server in (self._postgres, self._redis):
            server.process.wait_until(server.is_ready, timeout_s=START_TIMEOUT_S)
        self._postgres.ensure_database(
            DATABASE, application=APPLICATION, application_password=self._password
        )

    def close(self) -> None:
        self.thaw_postgres()
        for process in self._processes:
            process.stop()

    def stop_postgres(self) -> None:
        """Shut it down immediately: connections break, nothing is written any more."""
        postgres = self._tree()[0]
        postgres.send_signal(signal.SIGQUIT)
        postgres.wait(30)

    def start_postgres(self) -> None:
        """Start it; return when it takes connections."""
        self._postgres.process.start()
        self._postgres.process.wait_until(
            self._postgres.is_ready, timeout_s=START_TIMEOUT_S, step_s=0.02
        )

    def freeze_postgres(self) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw_postgres(self) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def stop_redis(self) -> None:
        self._redis.process.stop()

    def start_redis(self) -> None:
        self._redis.process.start()
        self._redis.process.wait_until(self._redis.is_ready, timeout_s=START_TIMEOUT_S)

    def _tree(self) -> list[psutil.Process]:
        """PostgreSQL's processes, the first of all first."""
        pid = self._postgres.process.pid
        if pid is None or not psutil.pid_exists(pid):
            return []
        postgres = psutil.Process(pid)
        return [postgres, *postgres.children(recursive=True)]


@contextlib.contextmanager
def own_servers(folder: Path, env: Mapping[str, str]) -> Iterator[OwnServers]:
    servers = OwnServers(folder, env)
    try:
        servers.start()
        yield servers
    finally:
        servers.close()
