"""The servers behind the demo and the tests: PostgreSQL, Redis and SeaweedFS, all from wheels.

    with EmbeddedStack(Path(".demo/stack")) as stack:
        subprocess.run([...], env={**os.environ, **stack.env})

The folder has the data, the logs and the generated passwords. A later start in the same folder
finds the data again, also after a kill.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from demo import servers
from demo.ports import HOST, HeldPorts, are_free, choose_ports
from demo.processes import ChildProcess, stop_leftover
from demo.state import write_private

DATABASE = "lorikeet"
#: The application's role in the database; DATABASE is also the name of its owner.
APPLICATION = "lorikeet_app"
BUCKET = "lorikeet"
START_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    postgres: int
    redis: int
    s3_master: int
    s3_volume: int
    s3_filer: int
    s3: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    postgres_password: str
    application_password: str
    redis_password: str
    s3_access_key_id: str
    s3_secret_access_key: str
    secret_key: str
    key_pepper: str


class EmbeddedStack:
    """PostgreSQL, Redis and SeaweedFS in one folder; `env` is available before they run.

    folder    data, logs, pids and passwords; made when missing
    durable   False: faster, but a power cut may lose data
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run = self.folder / "run"
        self.ports, self.secrets = _load_settings(self.folder / "stack.json", self.run)
        self._held = HeldPorts(dataclasses.asdict(self.ports).values())
        self._postgres = servers.Postgres(
            self.folder,
            port=self.ports.postgres,
            password=self.secrets.postgres_password,
            durable=durable,
            run=self.run,
        )
        self._redis = servers.Redis(
            self.folder,
            port=self.ports.redis,
            password=self.secrets.redis_password,
            run=self.run,
        )
        self._s3 = servers.SeaweedFS(
            self.folder,
            master_port=self.ports.s3_master,
            volume_port=self.ports.s3_volume,
            filer_port=self.ports.s3_filer,
            s3_port=self.ports.s3,
            access_key_id=self.secrets.s3_access_key_id,
            secret_access_key=self.secrets.s3_secret_access_key,
            run=self.run,
        )

    @property
    def processes(self) -> tuple[ChildProcess, ...]:
        """The processes, in the order in which they are stopped."""
        return (self._s3.process, self._redis.process, self._postgres.process)

    @property
    def env(self) -> dict[str, str]:
        """The environment variables with the servers' addresses and passwords."""
        place = f"{HOST}:{self.ports.postgres}/{DATABASE}"
        redis_url = f"redis://:{self.secrets.redis_password}@{HOST}:{self.ports.redis}"
        return {
            "LORIKEET_SECRET_KEY": self.secrets.secret_key,
            "LORIKEET_KEY_PEPPER": self.secrets.key_pepper,
            "DATABASE_URL": f"postgresql://{APPLICATION}:{self.secrets.application_password}@{place}",
            "DATABASE_OWNER_URL": f"postgresql://{DATABASE}:{self.secrets.postgres_password}@{place}",
            "REDIS_URL": f"{redis_url}/0",
            "CELERY_BROKER_URL": f"{redis_url}/1",
            "S3_ENDPOINT_URL": self._s3.url,
            "S3_PUBLIC_ENDPOINT_URL": self._s3.url,
            "S3_ACCESS_KEY_ID": self.secrets.s3_access_key_id,
            "S3_SECRET_ACCESS_KEY": self.secrets.s3_secret_access_key,
            "S3_BUCKET": BUCKET,
            "S3_REGION": servers.S3_REGION,
        }

    def start(self) -> None:
        """Start all three, and return when all answer.

        Raises StepFailed, with nothing left running.
        """
        self._held.release()
        try:
            # SeaweedFS takes longest, so it goes first.
            for server in (self._s3, self._redis, self._postgres):
                stop_leftover(server.process.pid_file)
                server.prepare()
                server.process.start()
            wait_s = START_TIMEOUT_S
            self._postgres.process.wait_until(self._postgres.is_ready, timeout_s=wait_s)
            self._postgres.ensure_database(
                DATABASE,
                application=APPLICATION,
                application_password=self.secrets.application_password,
            )
            self._redis.process.wait_until(self._redis.is_ready, timeout_s=wait_s)
            self._s3.process.wait_until(
                lambda: self._s3.ensure_bucket(BUCKET), timeout_s=wait_s, step_s=0.2
            )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the servers. Does nothing when none runs."""
        self._held.release()
        for process in self.processes:
            process.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def stop_stack(folder: Path) -> bool:
    """Stop the servers that a killed run left in `folder`. -> whether there were any."""
    stopped = [stop_leftover(path) for path in sorted((folder / "run").glob("*.json"))]
    return any(stopped)


def _load_settings(path: Path, run: Path) -> tuple[Ports, Secrets]:
    """Load ports and secrets from `path`; make new ones at first, new ports if they are taken."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    # Before the check for free ports: its own servers may hold them.
    stop_stack(run.parent)
    if stored and are_free(stored["ports"].values()):
        ports = Ports(**stored["ports"])
    else:
        names = [field.name for field in dataclasses.fields(Ports)]
        ports = Ports(**dict(zip(names, choose_ports(len(names)), strict=True)))
    # A folder of an earlier version does not have all secrets.
    kept = Secrets(**dataclasses.asdict(_new_secrets()) | stored.get("secrets", {}))
    write_private(path, {"ports": dataclasses.asdict(ports), "secrets": dataclasses.asdict(kept)})
    return ports, kept


def _new_secrets() -> Secrets:
    return Secrets(
        postgres_password=secrets.token_hex(16),
        application_password=secrets.token_hex(16),
        redis_password=secrets.token_hex(16),
        s3_access_key_id=secrets.token_hex(10).upper(),
        s3_secret_access_key=secrets.token_hex(20),
        secret_key=secrets.token_hex(32),
        key_pepper=secrets.token_hex(32),
    )
