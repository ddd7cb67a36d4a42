"""WorkerConfig: a worker's settings. The only file of the worker that reads the environment."""

from __future__ import annotations

import datetime as dt
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from contract.adapters.base_model import BaseModelFolder, NotABaseModel, find_base_model
from contract.process.child_environment import child_environment
from contract.process.log_lines import FORMATS, LEVELS
from contract.training.daily_window import DailyWindow
from contract.training.gpu_share import trainer_gpu_share

#: Longest path of a Unix socket on Linux, in bytes.
_MAX_SOCKET_BYTES = 107


class ConfigError(Exception):
    """An environment variable is missing or has a wrong value; the message names it."""


#: Values of a precision setting. auto: as in the model's folder.
PRECISIONS = ("auto", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Settings of training beside serving: docs/training.md.

    socket  a Unix socket, which the worker makes, where trainers ask
    share   of the time for training while all requests have their first token
    window  the hours in which it does; None: always
    """

    socket: Path
    share: float = 0.85
    window: DailyWindow | None = None

    def is_open(self) -> bool:
        """Return whether it is one of these hours."""
        return self.window is None or self.window.is_open(dt.datetime.now(dt.UTC))


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Config:
    endpoint_url: str
    access_key_id: str
    secret_access_key: str
    bucket: str
    region: str = "us-east-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelConfig:
    """The base model's folder, and the repository to download it from.

    origin      the folder's path outside the container; empty: it is Lorikeet's own volume
    repository  `org/name` on the Hugging Face Hub; `token` if it needs one
    """

    folder: Path
    name: str = ""
    revision: str = ""
    origin: str = ""
    repository: str = ""
    token: str = field(default="", repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> BaseModelConfig:
        """Read the settings. Raises ConfigError."""
        read = _Reader(environment)
        return cls(
            folder=Path(read.text("LORIKEET_BASE_MODEL")),
            name=read.text("LORIKEET_BASE_MODEL_NAME", ""),
            revision=read.text("LORIKEET_BASE_MODEL_REVISION", ""),
            origin=read.text("LORIKEET_BASE_MODEL_FOLDER", ""),
            repository=read.text("LORIKEET_BASE_MODEL_REPOSITORY", ""),
            token=read.text("HF_TOKEN", ""),
        )

    def find(self) -> BaseModelFolder:
        """Return the model in the folder. Raises NotABaseModel."""
        return find_base_model(
            self.folder,
            name=self.name,
            # The setting may be a branch; the download recorded its commit.
            revision="" if self.repository else self.revision,
            origin=self.origin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker's settings.

    worker_id            stays the same after a restart, so that the worker finds its inbox again
    model_dir            the base model's folder; see `worker.base_model`
    adapter_cache_bytes  disk space for adapters
    base_precision, kv_precision, adapter_precision, arena_bytes, max_running, max_step_tokens,
    max_context
                         the engine's; None: see EngineConfig
    max_adapter_bytes    the most of the arena that adapters may take
    min_kv_bytes         what adapters must leave to KV
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
    base_precision: str | None = None
    kv_precision: str | None = None
    adapter_precision: str | None = None
    arena_bytes: int | None = None
    #: Share of the GPU's memory that the engine leaves to a trainer on the same GPU.
    reserved_share: float = 0.0
    max_running: int | None = None
    max_step_tokens: int | None = None
    max_context: int | None = None
    max_adapter_bytes: int | None = None
    min_kv_bytes: int | None = None
    host_cache_bytes: int | None = None
    threads: int | None = None
    #: Settings of training beside serving; None: this worker trains nothing.
    training: TrainingConfig | None = None
    #: True if the engine drafts tokens: docs/speculation.md.
    speculation: bool = False
    #: Seconds that running requests have to finish after SIGTERM.
    drain_timeout_s: float = 30.0
    #: Seconds without a finished step after which an engine that has requests counts as stuck.
    stuck_timeout_s: float = 60.0
    #: Seconds between two flushes of tokens; a request's first token and its end do not wait.
    flush_interval_s: float = 0.025
    #: File that is touched at each heartbeat once the model is loaded; None: no file.
    alive_file: Path | None = None
    log_format: str = "console"
    log_level: str = "INFO"
    #: Port and address of /metrics, /healthz and /readyz, which need no key; port 0: no server.
    metrics_port: int = 0
    metrics_address: str = "127.0.0.1"

    @property
    def host_bytes(self) -> int:
        """The engine's host memory for adapters; 256 MiB is EngineConfig's default."""
        return 256 << 20 if self.host_cache_bytes is None else self.host_cache_bytes

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerConfig:
        """Read the settings; raise ConfigError naming the variable that is missing or wrong."""
        read = _Reader(environment)
        try:
            base = BaseModelConfig.from_environment(environment).find()
        except NotABaseModel as error:
            raise ConfigError(f"LORIKEET_BASE_MODEL: {error}") from error
        log_format, log_level = log_settings(environment)
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
            model_dir=base.path,
            base_model=base.name,
            base_revision=base.revision,
            adapter_dir=Path(read.text("LORIKEET_ADAPTER_DIR", ".cache/adapters")),
            adapter_cache_bytes=read.number("LORIKEET_ADAPTER_CACHE_BYTES", 8 << 30) or 8 << 30,
            device=read.text("LORIKEET_DEVICE", "cpu"),
            base_precision=_precision(read.one_of("LORIKEET_BASE_PRECISION", PRECISIONS, "auto")),
            kv_precision=_precision(read.one_of("LORIKEET_KV_PRECISION", PRECISIONS, "auto")),
            adapter_precision=_precision(
                read.one_of("LORIKEET_ADAPTER_PRECISION", PRECISIONS, "auto")
            ),
            arena_bytes=read.number("LORIKEET_ARENA_BYTES", None),
            reserved_share=_reserved_share(read),
            max_running=read.number("LORIKEET_MAX_RUNNING", None),
            max_step_tokens=read.number("LORIKEET_MAX_STEP_TOKENS", None),
            max_context=read.number("LORIKEET_MAX_CONTEXT", None),
            max_adapter_bytes=read.number("LORIKEET_MAX_ADAPTER_BYTES", None),
            min_kv_bytes=read.number("LORIKEET_MIN_KV_BYTES", None),
            host_cache_bytes=read.number("LORIKEET_HOST_CACHE_BYTES", None),
            threads=read.number("LORIKEET_THREADS", None),
            speculation=read.one_of("LORIKEET_SPECULATION", ("on", "off"), "off") == "on",
            training=_training(read),
            stuck_timeout_s=read.number("LORIKEET_STUCK_TIMEOUT_S", 60) or 60,
            drain_timeout_s=read.number("LORIKEET_DRAIN_TIMEOUT_S", 30) or 30,
            metrics_port=read.number("LORIKEET_METRICS_PORT", 0, least=0) or 0,
            metrics_address=read.text("LORIKEET_METRICS_ADDRESS", "127.0.0.1"),
            alive_file=Path(alive) if (alive := read.text("LORIKEET_ALIVE_PATH", "")) else None,
            log_format=log_format,
            log_level=log_level,
        )


def log_settings(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return the log's format and level, before the other settings are read.

    Raises ConfigError.
    """
    read = _Reader(environment)
    log_format = read.one_of("LORIKEET_LOG_FORMAT", FORMATS, "console")
    return log_format, read.one_of("LORIKEET_LOG_LEVEL", LEVELS, "INFO")


def let_threads_sleep() -> None:
    """Make torch's threads sleep while they wait; call it before torch is imported.

    Spinning threads slow a CPU engine tenfold as soon as anything else runs on its cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def drop_environment() -> None:
    """Remove the variables that children must not inherit; call it after reading the settings."""
    for name in os.environ.keys() - child_environment(os.environ):
        del os.environ[name]


def _precision(text: str) -> str | None:
    """Return the precision in `EngineConfig`'s form; None: as in the model's folder."""
    return None if text == "auto" else text


def _reserved_share(read: _Reader) -> float:
    """Return the share of GPU memory that the worker leaves free for training."""
    gpu = read.text("LORIKEET_GPU", "")
    trains = read.text("LORIKEET_TRAINING_SOCKET", "") != ""
    try:
        share = trainer_gpu_share(
            read.text("LORIKEET_TRAINER_GPU_SHARE", ""),
            gpu,
            gpu if trains else read.text("LORIKEET_TRAINER_GPU", ""),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return share or 0.0


def _training(read: _Reader) -> TrainingConfig | None:
    path = read.text("LORIKEET_TRAINING_SOCKET", "")
    if not path:
        return None
    text = read.text("LORIKEET_TRAINING_SHARE", "0.85")
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 < share < 1.0:
        raise ConfigError(f"LORIKEET_TRAINING_SHARE is {text!r}, not a number between 0 and 1")
    try:
        window = DailyWindow.parse(read.text("LORIKEET_TRAINING_WINDOW", ""))
    except ValueError as error:
        raise ConfigError(f"LORIKEET_TRAINING_WINDOW: {error}") from error
    _check_socket(Path(path))
    return TrainingConfig(socket=Path(path), share=share, window=window)


def _check_socket(path: Path) -> None:
    """Raise ConfigError if the worker cannot make its socket: before the model is loaded."""
    problem = ""
    if len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
        problem = f"the path is longer than {_MAX_SOCKET_BYTES} bytes"
    elif not path.is_absolute() or not os.access(path.parent, os.W_OK | os.X_OK):
        problem = f"this account cannot make a file in the folder {path.parent}"
    elif path.exists() and not path.is_socket():
        problem = "the path exists and is not a socket"
    if problem:
        raise ConfigError(
            f"LORIKEET_TRAINING_SOCKET is {str(path)!r}: {problem}. In Compose it is "
            "/run/training/worker-0.sock"
        )


class _Reader:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def text(self, name: str, default: str | None = None) -> str:
        """Return the variable, the content of the file that NAME_FILE names, or the default."""
        if file := self._environment.get(f"{name}_FILE"):
            try:
                value = Path(file).read_text().strip() or default
            except OSError as error:
                raise ConfigError(f"{name}_FILE: {error}") from error
        else:
            value = self._environment.get(name) or default
        if value is None:
            raise ConfigError(f"the environment variable {name} is not set: set it or {name}_FILE")
        if "change-me" in value:
            raise ConfigError(f"{name} still says change-me: give it a value of your own")
        return value

    def number(self, name: str, default: int | None, *, least: int = 1) -> int | None:
        text = self.text(name, "")
        if not text:
            return default
        try:
            value = int(text)
        except ValueError as error:
            raise ConfigError(f"{name} is not a whole number: {text!r}") from error
        if value < least:
            raise ConfigError(f"{name} must be positive: {text!r}")
        return value

    def one_of(self, name: str, values: tuple[str, ...], default: str) -> str:
        text = self.text(name, default)
        for value in values:
            if value.lower() == text.lower():
                return value
        raise ConfigError(f"{name} is {text!r}: set one of {', '.join(values)}")
