"""RemoteTrainer: the trainer in a serving worker, for the loop that otherwise has one of its own.

Files, rows, checkpoints and adapters stay on this side; the worker is given numbers, and gives
numbers back.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.training.checkpoint import Checkpoint
from engine.training.events import Event, RunEnded
from engine.training.run import RunRequest
from worker.training.wire import (
    BadMessage,
    Message,
    error_of,
    events_of,
    receive,
    run_message,
    send,
)


class TrainerBusy(Exception):
    """The worker trains nothing now; it may later."""


class TrainerRefuses(Exception):
    """The worker cannot train these runs."""


class TrainerGone(Exception):
    """The worker has ended, or has taken its memory back."""


class RemoteTrainer:
    """`engine.training.BatchTrainer` as `BatchTraining` uses it; one thread uses it.

    device          what the worker trains on
    on_wanted_back  called when a step says that the worker wants its memory back
    """

    def __init__(self, connection: socket.socket, device: str) -> None:
        self._connection, self.device = connection, device
        self._runs: set[str] = set()
        self.on_wanted_back: Callable[[], None] = lambda: None

    @classmethod
    def open(cls, path: Path, *, revision: str, sizes: list[int]) -> RemoteTrainer:
        """Get the worker's room. Raises TrainerBusy, TrainerRefuses.

        revision  of the base, as `contract.adapters.base_model` finds it in its folder
        sizes     of each run, in elements
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
            send(connection, Message({"do": "open", "revision": revision, "sizes": sizes}))
            reply = receive(connection)
        except (OSError, BadMessage) as error:
            connection.close()
            raise TrainerBusy(f"no worker answers: {error}") from error
        fields = reply.fields if reply is not None else {"refused": "the worker has ended"}
        if "refused" in fields:
            connection.close()
            raise (TrainerRefuses if fields.get("is_lasting") else TrainerBusy)(fields["refused"])
        return cls(connection, str(fields["device"]))

    @property
    def has_work(self) -> bool:
        return bool(self._runs)

    def add(self, request: RunRequest, saved: Checkpoint | None = None) -> None:
        """Have the worker train a run. Raises TrainingError as the trainer does."""
        message = run_message(request)
        tensors = dict(message.tensors)
        state = None
        if saved is not None:
            state = saved.state
            tensors |= {f"saved/{name}": tensor for name, tensor in saved.tensors.items()}
        self._call(Message({"do": "add", "saved": state, **message.fields}, tensors))
        self._runs.add(request.run_id)

    def cancel(self, run_id: str) -> None:
        self._call(Message({"do": "cancel", "run_id": run_id}))

    def checkpoint(self, run_id: str) -> Checkpoint | None:
        reply = self._call(Message({"do": "checkpoint", "run_id": run_id}))
        state: dict[str, Any] | None = reply.fields["state"]
        return None if state is None else Checkpoint(reply.tensors, state)

    def step(self) -> list[Event]:
        """Have a micro-batch trained, between the worker's requests."""
        reply = self._call(Message({"do": "step"}))
        try:
            events = events_of(reply)
        except BadMessage as error:
            raise TrainerGone(str(error)) from error
        for event in events:
            if isinstance(event, RunEnded):
                self._runs.discard(event.run_id)
        if reply.fields["is_wanted_back"]:
            self.on_wanted_back()
        return events

    def close(self) -> None:
        """Give the room back; idempotent."""
        self._connection.close()

    def _call(self, message: Message) -> Message:
        try:
            send(self._connection, message)
            reply = receive(self._connection)
        except (OSError, BadMessage) as error:
            raise TrainerGone(f"the worker is gone: {error}") from error
        if reply is None or "gone" in reply.fields:
            raise TrainerGone("the worker is gone" if reply is None else reply.fields["gone"])
        if "error" in reply.fields:
            raise error_of(reply.fields["error"])
        return reply
