"""Everything a worker is told from outside, and the only file of it that reads the environment."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contract.child_environment import child_environment
from worker.base_model import MANIFEST


class ConfigError(Exception):
    """A variable is missing or its value cannot be used; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    endpoint_url: str
    access_key_id: str
    secret_access_key: str
    bucket: str
    region: str = "us-east-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker's settings.

    worker_id            the same after a restart: what was in its inbox is its own
    model_dir            the base model's folder; see `worker.base_model`
    adapter_cache_bytes  how much of the disk adapters may take
    arena_bytes          the engine's page arena; None: see EngineConfig.arena_bytes
    max_adapter_bytes, min_kv_bytes  how much of it adapters may have, and must leave to KV
    host_cache_bytes     the engine's host memory for adapters, pinned on a GPU
    """

    worker_id: str
    pool: str
    redis_url: str
    s3: S3Config
    model_dir: Path
    base_model: str
    base_revision: str
    adapter_dir: Path
    adapter_cache_bytes: int = 8 << 30
    device: str = "cpu"
    arena_bytes: int | None = None
    max_adapter_bytes: int | None = None
    min_kv_bytes: int | None = None
    host_cache_bytes: int | None = None
    threads: int | None = None
    #: What runs at SIGTERM has so long to finish.
    drain_timeout_s: float = 30.0
    #: An engine that has requests and does no step for so long is stuck.
    stuck_timeout_s: float = 60.0
    #: Between two flushes of tokens; a request's first token and its end do not wait.
    flush_interval_s: float = 0.025

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerConfig:
        """Raises ConfigError with the name of the variable that is missing or wrong."""
        read = _Reader(environment)
        model_dir = Path(read.text("LORIKEET_BASE_MODEL"))
        base_model, base_revision = _manifest(model_dir)
        return cls(
            worker_id=read.text("LORIKEET_WORKER_ID", socket.gethostname()),
            pool=read.text("LORIKEET_POOL", "default"),
            redis_url=read.text("REDIS_URL"),
            s3=S3Config(
                endpoint_url=read.text("S3_ENDPOINT_URL"),
                access_key_id=read.text("S3_ACCESS_KEY_ID"),
                secret_access_key=read.text("S3_SECRET_ACCESS_KEY"),
                bucket=read.text("S3_BUCKET", "lorikeet"),
                region=read.text("S3_REGION", "us-east-1"),
            ),
            model_dir=model_dir,
            base_model=base_model,
            base_revision=base_revision,
            adapter_dir=Path(read.text("LORIKEET_ADAPTER_DIR", ".cache/adapters")),
            adapter_cache_bytes=read.number("LORIKEET_ADAPTER_CACHE_BYTES", 8 << 30) or 8 << 30,
            device=read.text("LORIKEET_DEVICE", "cpu"),
            arena_bytes=read.number("LORIKEET_ARENA_BYTES", None),
            max_adapter_bytes=read.number("LORIKEET_MAX_ADAPTER_BYTES", None),
            min_kv_bytes=read.number("LORIKEET_MIN_KV_BYTES", None),
            host_cache_bytes=read.number("LORIKEET_HOST_CACHE_BYTES", None),
            threads=read.number("LORIKEET_THREADS", None),
            stuck_timeout_s=read.number("LORIKEET_STUCK_TIMEOUT_S", 60) or 60,
            drain_timeout_s=read.number("LORIKEET_DRAIN_TIMEOUT_S", 30) or 30,
        )


def _manifest(model_dir: Path) -> tuple[str, str]:
    """Name and revision of the base model in the folder."""
    try:
        manifest = json.loads((model_dir / MANIFEST).read_text())
        return manifest["name"], manifest["revision"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"LORIKEET_BASE_MODEL: {model_dir} is not a base model folder ({error!r}); "
            "make one with `python -m worker.base_model`"
        ) from error


def let_threads_sleep() -> None:
    """Make torch's threads sleep while they wait; before torch is imported, which reads this.

    Threads that spin slow a CPU engine tenfold as soon as anything else runs on its cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def drop_environment() -> None:
    """Forget all variables that children must not inherit; after the configuration was read."""
    for name in os.environ.keys() - child_environment(os.environ):
        del os.environ[name]


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str, default: str | None = None) -> str:
        """The variable, or the content of the file that NAME_FILE points to, or the default."""
        if file := self._environment.get(f"{name}_FILE"):
            try:
                return Path(file).read_text().strip()
            except OSError as error:
                raise ConfigError(f"{name}_FILE: {error}") from error
        value = self._environment.get(name) or default
        if value is None:
            raise ConfigError(f"the environment variable {name} is not set")
        return value

    def number(self, name: str, default: int | None) -> int | None:
        text = self.text(name, "")
        if not text:
            return default
        try:
            value = int(text)
        except ValueError as error:
            raise ConfigError(f"{name} is not a whole number: {text!r}") from error
        if value <= 0:
            raise ConfigError(f"{name} must be positive: {text!r}")
        return value
