"""EngineProcess: takes commands, does one step, sends outputs; blocks while there is no work.

An exception that the engine did not turn into a request's error ends the process. The worker is
then restarted and recovers its inbox: that is simpler and safer than to use a broken engine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from contract.adapters.base_model import find_base_model
from contract.messages.protocol import adapter_digest_of
from engine.errors import AdapterMismatch, EngineError, OutOfPages, UnknownAdapter
from engine.request import FinishReason, KeptPrefix, Request, RequestOutput
from engine.stats import EngineStats
from worker.config import WorkerConfig
from worker.engine_process.channel import (
    Cancel,
    Command,
    KeepPrefixes,
    Pin,
    Prefetch,
    Register,
    StepReport,
    Unregister,
)
from worker.engine_process.parent_death import die_with_parent
from worker.engine_process.precision import describe, precision_prompts
from worker.logs import adopt_libraries, configure_logs

log = logging.getLogger(__name__)

#: Pause after a step without output: its requests may wait for an adapter to load.
STALL_POLL_S = 0.001
STATS_INTERVAL_S = 0.25
#: Errors that stay, because a digest's content never changes. Disk errors may pass.
_LASTING = (AdapterMismatch, OutOfPages)


class EngineLike(Protocol):
    """The methods of `engine.Engine` that this process uses."""

    def register_adapter(self, digest: str, path: Path) -> None: ...
    def unregister_adapter(self, digest: str) -> None: ...
    def prefetch(self, digest: str, *, to_arena: bool = ...) -> None: ...
    def pin_adapters(self, wanted: Sequence[tuple[str, str]]) -> None: ...
    def keep_prefixes(self, wanted: Sequence[KeptPrefix]) -> None: ...
    def prepare_grammars(self) -> Future[None]: ...
    def add(self, request: Request) -> None: ...
    def cancel(
        self, request_id: str, reason: FinishReason = ..., index: int | None = ...
    ) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def settle(self) -> list[RequestOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...


class HostLike(Protocol):
    """The methods of `TrainingHost` that this process uses."""

    bell: socket.socket

    def attend(self) -> None: ...


EngineFactory = Callable[[WorkerConfig], EngineLike]


class NoDevice(Exception):
    """Raised if the engine's device does not exist; the message says what to do."""


def create_engine(config: WorkerConfig) -> EngineLike:
    """Make the real engine; imported here, so that tests with another engine need no torch.

    Raises NoDevice.
    """
    import torch

    from engine import Engine, EngineConfig  # type: ignore[attr-defined]

    adopt_libraries()
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise NoDevice(
            f"LORIKEET_DEVICE is {config.device}, and there is no GPU that this torch can use: see "
            "that `nvidia-smi` works here, or set cpu (in Compose the profile `cpu`)"
        )
    given: dict[str, Any] = {
        "base_precision": config.base_precision,
        "kv_precision": config.kv_precision,
        "adapter_precision": config.adapter_precision,
        "precision_prompts": precision_prompts(config.model_dir),
        "arena_bytes": config.arena_bytes,
        "reserved_share": config.reserved_share,
        "max_running": config.max_running,
        "max_step_tokens": config.max_step_tokens,
        "max_context": config.max_context,
        "max_adapter_bytes": config.max_adapter_bytes,
        "min_kv_bytes": config.min_kv_bytes,
        "host_cache_bytes": config.host_cache_bytes,
        "num_threads": config.threads,
        "speculation": config.speculation,
        "lends_weights": config.training is not None,
    }

    def digest_of(config_text: bytes, tensors_sha256: str) -> str:
        return adapter_digest_of(json.loads(config_text), tensors_sha256, config.base_revision)

    engine: EngineLike = Engine(
        EngineConfig(
            model_dir=config.model_dir,
            device=config.device,
            **{name: value for name, value in given.items() if value is not None},
        ),
        digest_of=digest_of,
    )
    if said := describe(engine.stats().precision):
        log.info("%s", said)
    return engine


def make_host(engine: Any, loop: EngineProcess, config: WorkerConfig) -> HostLike:
    """Let trainers use the engine; imported here, as only some workers train."""
    from torch.cuda import get_device_name

    from engine.beside.room import BesideConfig, TrainingRoom
    from worker.engine_process.training_host import TrainingHost

    settings = config.training
    assert settings is not None
    device = engine.lending.weights.norm.device
    room = TrainingRoom(engine, loop, BesideConfig(share=settings.share))
    if device.type == "cuda":
        room.prepare()
    return TrainingHost(
        room,
        settings.socket,
        revision=find_base_model(config.model_dir).revision,
        device=get_device_name(device) if device.type == "cuda" else "cpu",
        is_open=settings.is_open,
    )


def main(connection: Connection, config: WorkerConfig, engine_factory: EngineFactory) -> None:
    """Run the process until the IO process ends."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the IO process, which drains
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(config.log_format, config.log_level)
    try:
        engine = engine_factory(config)
    except NoDevice as error:
        log.error("%s", error)
        sys.exit(2)
    loop = EngineProcess(engine, connection)
    if config.training is not None:
        loop.host = make_host(engine, loop, config)
    # Keep the garbage collector from visiting objects that live as long as the process: with a
    # loaded engine, a full collection took 7 to 17 ms within a step (docs/history/performance.md).
    gc.collect()
    gc.freeze()
    try:
        loop.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        log.info("the IO process is gone")


class EngineProcess:
    """Runs one engine for one pipe. Remembers which adapters the engine refused."""

    def __init__(self, engine: EngineLike, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._refused: dict[str, tuple[Register, Exception]] = {}  # by digest
        self._is_stalled = False
        self._told_stats_at = 0.0
        self._unsent: list[RequestOutput] = []
        self.host: HostLike | None = None

    def run(self) -> None:
        self._connection.send(StepReport(stats=self._engine.stats()))
        # The engine is ready; a thread imports what the first grammar needs.
        self._engine.prepare_grammars().add_done_callback(_on_prepared)
        while True:
            self.turn()

    def turn(self) -> None:
        """Take the commands that have arrived, train if asked, do one step, and report it."""
        self._unsent += self._apply(self._receive())
        if self.host is not None:
            self.host.attend()
        self.step()

    def receive(self) -> None:
        """Take the commands that have arrived; for `TrainingRoom`, between two layers."""
        if self._connection.poll():
            self._unsent += self._apply(self._receive_more())
            if self._unsent and not self._engine.has_work():
                self.step()

    def step(self) -> None:
        """Do one step, if there is work, and report it."""
        stepped = []
        if self._engine.has_work():
            stepped = self._engine.step()
            self._is_stalled = not stepped
        self._report(stepped)

    def settle(self) -> None:
        """Have the engine read the step in flight, and report it; for `TrainingRoom`."""
        self._report(self._engine.settle())

    def _report(self, stepped: list[RequestOutput]) -> None:
        outputs, self._unsent = [*self._unsent, *stepped], []
        now = time.monotonic()
        is_due = now - self._told_stats_at >= STATS_INTERVAL_S or not self._engine.has_work()
        if is_due:
            self._told_stats_at = now
        if outputs or is_due:
            self._connection.send(
                StepReport(outputs=outputs, stats=self._engine.stats() if is_due else None)
            )

    def _receive(self) -> list[Command]:
        """Return all commands that have arrived; wait for one if there is nothing to do."""
        if not self._engine.has_work():
            wait([self._connection] if self.host is None else [self._connection, self.host.bell])
        elif self._is_stalled:
            self._connection.poll(STALL_POLL_S)
        return self._receive_more()

    def _receive_more(self) -> list[Command]:
        commands: list[Command] = []
        while self._connection.poll():
            commands += self._connection.recv()
        return commands

    def _apply(self, commands: Iterable[Command]) -> list[RequestOutput]:
        """Apply the commands to the engine; return the outputs of requests that it refuses."""
        refused = []
        for command in commands:
            match command:
                case Request():
                    if output := self._add(command):
                        refused.append(output)
                case Cancel():
                    self._engine.cancel(command.request_id, command.reason, command.index)
                case Register():
                    self._register(command)
                case Unregister():
                    self._refused.pop(command.digest, None)
                    self._engine.unregister_adapter(command.digest)
                case Prefetch():
                    self._prefetch(command)
                case Pin():
                    self._engine.pin_adapters(command.wanted)
                case KeepPrefixes():
                    self._engine.keep_prefixes(command.wanted)
        return refused

    def _add(self, request: Request) -> RequestOutput | None:
        log.debug("request begins", extra={"request_id": request.request_id})
        for part in request.adapters:
            if refusal := self._refusal_of(part.digest):
                return _refusal(request, refusal)
        try:
            self._engine.add(request)
        except Exception as error:
            return _refusal(request, error)
        return None

    def _register(self, command: Register) -> None:
        try:
            self._engine.register_adapter(command.digest, Path(command.folder))
        except Exception as error:
            self._refused[command.digest] = command, error
            log.warning("adapter refused: %r", error, extra={"adapters": [command.digest]})
        else:
            self._refused.pop(command.digest, None)

    def _prefetch(self, command: Prefetch) -> None:
        if self._refusal_of(command.digest):
            return  # it was reported when it was registered
        # the adapter was evicted from the disk in between
        with contextlib.suppress(UnknownAdapter):
            self._engine.prefetch(command.digest, to_arena=command.to_arena)

    def _refusal_of(self, digest: str) -> Exception | None:
        """Return why the engine refuses the adapter, after another attempt if that may help."""
        if digest in self._refused and not isinstance(self._refused[digest][1], _LASTING):
            self._register(self._refused[digest][0])
        return self._refused[digest][1] if digest in self._refused else None


def _on_prepared(prepared: Future[None]) -> None:
    if error := prepared.exception():
        log.warning("constrained answers will fail: grammars cannot be prepared: %r", error)
    gc.collect()  # as in `main`, for objects made since
    gc.freeze()


def to_engine_error(error: Exception, request_id: str = "") -> EngineError:
    """Return the error for the request's client; log one that the engine did not expect."""
    if isinstance(error, EngineError):
        return error
    log.error("a request failed", exc_info=error, extra={"request_id": request_id})
    return EngineError("The worker failed on this request.")


def _refusal(request: Request, error: Exception) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error=to_engine_error(error, request.request_id),
        num_prompt_tokens=len(request.token_ids),
    )
