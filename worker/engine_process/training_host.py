"""TrainingHost: lends the engine process's training room to a trainer process, over a Unix socket.

Whoever gives runs (`worker.train`) asks for one thing at a time: a micro-batch, a checkpoint.
The engine's thread does it between two turns of its own, and during a micro-batch it serves. Other
threads read and write the sockets, so that nobody waits for them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from engine.beside.room import TrainingRoom
from engine.errors import OutOfMemory
from engine.training.checkpoint import Checkpoint
from engine.training.errors import TrainingError
from engine.training.trainer import BatchTrainer
from worker.training.wire import (
    BadMessage,
    Message,
    error_fields,
    events_message,
    named,
    receive,
    run_of,
    send,
)

log = logging.getLogger(__name__)

#: Seconds without training after requests found too few pages.
PAUSE_S = 30.0
#: Seconds that the runs' owner has to save them once the memory is wanted back, while requests wait
#: for pages and otherwise. A run that is not saved has a state on its disk that is a minute old.
_GRACE_SHORT_S, _GRACE_S = 10.0, 120.0
_MOST_CLIENTS = 16
_MOST_RUNS = 4096


class _Client:
    """One connection: the bytes that it received, and the bytes to send."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.replies: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def close(self) -> None:
        self.replies.put(None)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class TrainingHost:
    """Owns the socket and knows who trains; only the engine's thread calls it, except `close`.

    path      of the socket, which is made; the user's own alone
    revision  of the base, as `contract.adapters.base_model` finds it in the folder
    is_open   whether training may run now: the pool's hours
    bell      readable when `attend` has something to do
    """

    def __init__(
        self,
        room: TrainingRoom,
        path: Path,
        *,
        revision: str,
        device: str,
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self._room, self._revision, self._device = room, revision, device
        self._is_open = is_open
        self._inbox: queue.SimpleQueue[tuple[_Client, Message | None]] = queue.SimpleQueue()
        self.bell, self._ring = socket.socketpair()
        self.bell.setblocking(False)
        self._owner: _Client | None = None
        self._trainer: BatchTrainer | None = None
        self._paused_until = 0.0
        self._gone_at: float | None = None  # when training ends, whoever uses it
        self._num_clients = threading.Semaphore(_MOST_CLIENTS)
        self._listener = _listen(path)
        threading.Thread(target=self._accept, name="training-socket", daemon=True).start()

    def attend(self) -> None:
        """Do one thing that a trainer asks for, and everything that takes no time."""
        with contextlib.suppress(BlockingIOError):
            self.bell.recv(4096)
        if self._gone_at is not None and time.monotonic() >= self._gone_at:
            self._close("its time to save the runs is over")
        with contextlib.suppress(queue.Empty):
            while True:
                client, message = self._inbox.get_nowait()
                if message is None:
                    if client is self._owner:
                        self._close("its owner has left")
                    continue
                client.replies.put(self._reply(client, message))
                if message.fields.get("do") == "step":
                    break
        if not self._inbox.empty():
            self._ring.send(b".")

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _reply(self, client: _Client, message: Message) -> Message:
        """Return the answer; never raise, because an error of training must not end serving."""
        try:
            if message.fields.get("do") == "open":
                return self._open(client, message.fields)
            if client is not self._owner or self._trainer is None:
                return Message({"gone": "the worker has taken its memory back"})
            return self._do(self._trainer, message)
        except TrainingError as error:
            return Message({"error": error_fields(error)})
        except torch.OutOfMemoryError as error:
            log.warning("training found too little memory: %s", error)
            return self._fail("the GPU has too little memory for a micro-batch")
        except Exception:
            log.exception("training failed")
            return self._fail("training failed: the worker's log says why")

    def _open(self, client: _Client, fields: Mapping[str, Any]) -> Message:
        sizes = fields["sizes"]
        if fields["revision"] != self._revision:
            return _refused("the worker serves another base model", is_lasting=True)
        if not isinstance(sizes, list) or not 1 <= len(sizes) <= _MOST_RUNS:
            return _refused("sizes must be a list with one number for each run", is_lasting=True)
        if self._owner is not None:
            return _refused("the worker trains other runs")
        if not self._is_open():
            return _refused("the worker does not train at this hour")
        if time.monotonic() < self._paused_until:
            return _refused("requests need the worker's memory")
        try:
            trainer = self._room.open([int(size) for size in sizes])
        except OutOfMemory as error:
            return _refused(error.message, is_lasting=True)
        if trainer is None:
            return _refused("the worker has too few free pages now")
        self._owner, self._trainer, self._gone_at = client, trainer, None
        log.info("training begins, beside requests", extra={"runs": len(sizes)})
        return Message({"device": self._device})

    def _do(self, trainer: BatchTrainer, message: Message) -> Message:
        fields = message.fields
        match fields["do"]:
            case "add":
                saved = None
                if fields["saved"] is not None:
                    saved = Checkpoint(named(message.tensors, "saved/"), dict(fields["saved"]))
                trainer.add(run_of(message), saved)
                return Message({})
            case "cancel":
                trainer.cancel(fields["run_id"])
                return Message({})
            case "checkpoint":
                taken = trainer.checkpoint(fields["run_id"])
                return Message({"state": None}) if taken is None else Message(
                    {"state": taken.state}, taken.tensors
                )  # fmt: skip
            case "step":
                events = trainer.step()
                return events_message(events, is_wanted_back=self._is_wanted_back())
        raise BadMessage(f"{fields['do']!r} is not a known command")

    def _is_wanted_back(self) -> bool:
        """Return whether the owner must save its runs and leave; note until when."""
        is_short = self._room.is_wanted_back
        if not is_short and self._is_open():
            return False
        now = time.monotonic()
        if is_short:
            self._paused_until = now + PAUSE_S
        grace = _GRACE_SHORT_S if is_short else _GRACE_S
        self._gone_at = min(self._gone_at or now + grace, now + grace)
        return True

    def _fail(self, why: str) -> Message:
        self._close(why)
        return Message({"gone": why})

    def _close(self, why: str) -> None:
        """Take the memory back."""
        if self._owner is not None:
            log.info("training ends: %s", why)
        self._owner = self._trainer = self._gone_at = None
        self._room.close()

    # Methods of other threads

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the socket was closed
            while True:
                self._num_clients.acquire()
                client = _Client(self._listener.accept()[0])
                for work in (self._read, self._write):
                    threading.Thread(
                        target=work, args=(client,), name="training-client", daemon=True
                    ).start()

    def _read(self, client: _Client) -> None:
        try:
            while (message := receive(client.connection)) is not None:
                self._put(client, message)
        except (BadMessage, OSError) as error:
            log.warning("a trainer's connection ends: %s", error)
        finally:
            self._put(client, None)
            client.close()
            self._num_clients.release()

    def _put(self, client: _Client, message: Message | None) -> None:
        self._inbox.put((client, message))
        with contextlib.suppress(BlockingIOError, OSError):
            self._ring.send(b".")

    def _write(self, client: _Client) -> None:
        with contextlib.suppress(OSError), client.connection:
            while (message := client.replies.get()) is not None:
                send(client.connection, message)


def _refused(why: str, *, is_lasting: bool = False) -> Message:
    return Message({"refused": why, "is_lasting": is_lasting})


def _listen(path: Path) -> socket.socket:
    """Make the socket, in place of one that a killed worker left."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(_MOST_CLIENTS)
    return listener
