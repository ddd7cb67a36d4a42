"""The platform's own processes, started on this machine as an operator would."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import redis

from contract.messages.protocol import PAYLOAD_FIELD, Heartbeat, worker_key
from demo.ports import HOST, choose_ports
from demo.processes import ChildProcess, Command
from demo.seed import ROOT

POOL = "default"
NAMES = (
    *("worker", "web", "accountant", "batch-runner", "celery", "trainer", "inspector", "beat"),
)
#: The same after every restart, so that the worker keeps its inbox.
WORKER_ID = "demo-1"
#: A cold start reads the model and imports torch on a machine that may be busy.
START_TIMEOUT_S = 120.0


def environment(
    stack_env: Mapping[str, str], *, folder: Path, base_url: str, base_model_dir: Path
) -> dict[str, str]:
    """Return this process's environment with all variables that the platform's processes read."""
    return {
        **os.environ,
        **stack_env,
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "LORIKEET_POOL": POOL,
        "LORIKEET_BASE_URL": base_url,
        "EMAIL_URL": f"file://{mail_folder(folder)}",
        "LORIKEET_ALLOWED_HOSTS": f"{HOST},localhost",
        "LORIKEET_DEBUG": "0",
        # It listens only on this machine, and its operator's password is random.
        "LORIKEET_OPERATOR_SECOND_FACTOR": "0",
        "LORIKEET_STATIC_ROOT": str(folder / "static"),
        "LORIKEET_BASE_MODEL_DIR": str(base_model_dir.parent),
        "LORIKEET_WORK_DIR": str(folder / "work"),
        "LORIKEET_WORKER_ID": WORKER_ID,
        "LORIKEET_BASE_MODEL": str(base_model_dir),
        "LORIKEET_ADAPTER_DIR": str(folder / "adapters"),
        "LORIKEET_DEVICE": "cpu",
        "PYTHONUNBUFFERED": "1",
    }


def mail_folder(folder: Path) -> Path:
    """Return the folder of the platform's mail, one file each; their links open accounts."""
    return folder.resolve() / "mail"


class Platform:
    """Web, worker, accountant, batch runner and Celery as child processes of one folder."""

    def __init__(self, env: Mapping[str, str], *, folder: Path, port: int) -> None:
        #: By the processes' names.
        self.metrics_ports = dict(zip(NAMES, choose_ports(len(NAMES)), strict=True))
        # Only `manage.py migrate` connects as the tables' owner.
        self._env = {name: value for name, value in env.items() if name != "DATABASE_OWNER_URL"}
        self._folder = folder
        self.base_url = f"http://{HOST}:{port}"
        python = sys.executable
        celery = [python, "-m", "celery", "-A", "controlplane"]
        quiet = ["--loglevel=INFO", "--without-gossip", "--without-mingle"]
        beat_file = folder / "run" / "beat"
        self.web = self._process(
            "web",
            *[python, "-m", "controlplane.serve"],
            *[f"--host={HOST}", f"--port={port}", "--no-access-log"],
            "--timeout-graceful-shutdown=5",
            # Opening a connection takes longer than all other work of the gateway.
            DATABASE_POOL_SIZE="8",
            FORWARDED_ALLOW_IPS="",  # there is no proxy
        )
        self.worker = self._process("worker", python, "-m", "worker")
        self.accountant = self._process("accountant", python, "manage.py", "accountant")
        self.batch_runner = self._process("batch-runner", python, "manage.py", "batch_runner")
        self.celery = self._process(
            "celery", *celery, "worker", "-Q", "ingest,ops", "-c", "1", "-n", "ops@%h", *quiet
        )
        self.trainer = self._process(
            "trainer", *celery, "worker", "-Q", "train", "-c", "1", "-n", "train@%h", *quiet
        )
        self.inspector = self._process(
            "inspector", *celery, "worker", "-Q", "inspect", "-c", "1", "-n", "inspect@%h", *quiet
        )
        self.beat = self._process(
            "beat", *celery, "beat", "--loglevel=INFO", f"--schedule={beat_file}", "--pidfile="
        )

    @property
    def processes_without_base(self) -> tuple[ChildProcess, ...]:
        """Return those that start while the base model is not there, in order."""
        return (
            self.web,
            self.accountant,
            self.batch_runner,
            self.celery,
            self.inspector,
            self.beat,
        )

    def wait_until_ready(self) -> None:
        """Wait until the gateway answers and the worker has sent a heartbeat."""
        self.web.wait_until(self._web_answers, timeout_s=START_TIMEOUT_S)
        self.worker.wait_until(self.worker_is_up, timeout_s=START_TIMEOUT_S, step_s=0.2)

    def _web_answers(self) -> bool:
        try:
            return httpx.get(f"{self.base_url}/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def worker_is_up(self) -> bool:
        """Return whether this run's worker, not an earlier one, has loaded its model."""
        heartbeat, started_at = self.heartbeat(), self.worker.started_at
        if heartbeat is None or heartbeat.loading:
            return False
        return bool(started_at and heartbeat.started_at >= started_at)

    def heartbeat(self) -> Heartbeat | None:
        """Return the worker's last heartbeat."""
        with redis.Redis.from_url(self._env["REDIS_URL"], decode_responses=True) as client:
            payload = client.hget(worker_key(POOL, WORKER_ID), PAYLOAD_FIELD.decode())
        return Heartbeat.decode(payload) if isinstance(payload, str) else None

    def _process(self, name: str, *argv: str, **env: str) -> ChildProcess:
        return ChildProcess(
            name,
            Command(
                argv=argv,
                env={**self._env, "LORIKEET_METRICS_PORT": str(self.metrics_ports[name]), **env},
                cwd=ROOT,
            ),
            log=self._folder / "logs" / f"{name}.log",
            pid_file=self._folder / "run" / f"{name}.json",
        )
