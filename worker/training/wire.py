"""Messages between a trainer in a serving worker and who gives it runs, over a Unix socket.

    4 bytes   length of the header, big endian
    header    JSON; "tensors" lists [name, type, shape] of what follows
    tensors   their bytes, one behind the other

Nothing else than numbers and text is sent, and nothing is run that comes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.training.errors import RunRefused, RunTooLarge, RunUnsupported, TrainingError
from engine.training.events import Event, RunEnded, RunProgress, RunStarted
from engine.training.run import HeldOut, RunRequest, RunRows, RunSettings

MAX_HEADER_BYTES = 32 << 20
MAX_TENSOR_BYTES = 16 << 30
#: Before the names of a run's tensors: of its starting adapter, of its rows to validate with.
_ADAPTER, _HELD_OUT = "adapter/", "held_out/"
_LENGTH = struct.Struct(">I")
_TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "int32": torch.int32,
    "bool": torch.bool,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_EVENTS: dict[str, type[RunStarted] | type[RunProgress] | type[RunEnded]] = {
    kind.__name__: kind for kind in (RunStarted, RunProgress, RunEnded)
}


class BadMessage(Exception):
    """Received bytes that are no message."""


@dataclass(frozen=True, slots=True)
class Message:
    fields: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def send(connection: socket.socket, message: Message) -> None:
    """Send a message; its tensors are on the host. Raises OSError."""
    listed, parts = [], []
    for name, tensor in message.tensors.items():
        listed.append([name, _NAMES[tensor.dtype], list(tensor.shape)])
        parts.append(tensor.detach().contiguous())
    header = json.dumps({**message.fields, "tensors": listed}).encode()
    connection.sendall(_LENGTH.pack(len(header)) + header)
    for part in parts:
        if part.numel():
            connection.sendall(_bytes_of(part))


def receive(connection: socket.socket) -> Message | None:
    """Wait for the next message; None: the other side has ended. Raises BadMessage, OSError."""
    first = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
    if not first:
        return None
    if len(first) < _LENGTH.size:
        raise BadMessage("it ends in its length")
    (length,) = _LENGTH.unpack(first)
    if length > MAX_HEADER_BYTES:
        raise BadMessage(f"its header has {length} bytes")
    try:
        fields = json.loads(bytes(_receive_bytes(connection, length)))
        wanted = [(str(name), _TYPES[kind], _shape(shape)) for name, kind, shape in
                  fields.pop("tensors")]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"its header: {error!r}") from error
    if sum(math.prod(shape) * kind.itemsize for _, kind, shape in wanted) > MAX_TENSOR_BYTES:
        raise BadMessage("its tensors are too large")
    tensors = {}
    for name, kind, shape in wanted:
        tensor = torch.empty(shape, dtype=kind)
        if tensor.numel():
            _receive_into(connection, _bytes_of(tensor))
        tensors[name] = tensor
    return Message(fields, tensors)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Its memory, byte by byte."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _shape(given: Any) -> tuple[int, ...]:
    if len(given) > 4 or not all(isinstance(size, int) and 0 <= size < 1 << 40 for size in given):
        raise ValueError(f"{given!r} is no shape")
    return tuple(given)


def _receive_bytes(connection: socket.socket, length: int) -> bytearray:
    buffer = bytearray(length)
    _receive_into(connection, memoryview(buffer))
    return buffer


def _receive_into(connection: socket.socket, buffer: memoryview) -> None:
    while len(buffer):
        count = connection.recv_into(buffer)
        if not count:
            raise BadMessage("it ends in the midst")
        buffer = buffer[count:]


def run_message(request: RunRequest) -> Message:
    """Make the message of a run that is to be trained; `run_of` reads it."""
    held_out = request.held_out
    fields = {
        "run_id": request.run_id,
        "tenant": request.tenant,
        "settings": dataclasses.asdict(request.settings),
        "lengths": request.rows.lengths,
        "held_out": None,
    }
    tensors = _rows_tensors(request.rows, "")
    if held_out is not None:
        lengths, every, patience = held_out.rows.lengths, held_out.every, held_out.patience
        fields["held_out"] = {"lengths": lengths, "every": every, "patience": patience}
        tensors |= _rows_tensors(held_out.rows, _HELD_OUT)
    for name, tensor in (request.adapter or {}).items():
        tensors[_ADAPTER + name] = tensor
    return Message(fields, tensors)


def _rows_tensors(rows: RunRows, prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}token_ids": rows.token_ids, f"{prefix}is_answer": rows.is_answer}


def run_of(message: Message) -> RunRequest:
    """Read a message of `run_message`. Raises RunRefused for wrong settings or rows."""
    fields, tensors = message.fields, message.tensors
    try:
        given = dict(fields["settings"])
        for name in ("target_modules", "modules_to_save", "trainable_token_ids", "layers"):
            if isinstance(given.get(name), list):
                given[name] = tuple(given[name])
        held_out = fields["held_out"]
        if held_out is not None:
            patience = held_out["patience"]
            held_out = HeldOut(
                rows=_rows_of(tensors, held_out["lengths"], _HELD_OUT),
                every=int(held_out["every"]),
                patience=None if patience is None else int(patience),
            )
        return RunRequest(
            run_id=str(fields["run_id"]),
            tenant=str(fields["tenant"]),
            rows=_rows_of(tensors, fields["lengths"], ""),
            settings=RunSettings(**given),
            adapter=named(tensors, _ADAPTER) or None,
            held_out=held_out,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunRefused(f"it cannot be read: {error!r}", param="rows") from error


def _rows_of(tensors: Mapping[str, torch.Tensor], given: Any, prefix: str) -> RunRows:
    """Read rows. Raises KeyError, TypeError, ValueError if they are malformed."""
    lengths = [int(length) for length in given]
    token_ids, is_answer = tensors[f"{prefix}token_ids"], tensors[f"{prefix}is_answer"]
    kinds = (token_ids.dtype, is_answer.dtype)
    if kinds != (torch.int32, torch.bool) or token_ids.dim() != 1:
        raise ValueError("rows are of other types")
    if min(lengths) < 1 or not len(token_ids) == len(is_answer) == sum(lengths):
        raise ValueError("the lengths are not the rows'")
    return RunRows(token_ids, is_answer, lengths)


def named(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with `prefix`, by the rest of their names."""
    found = ((name, tensor) for name, tensor in tensors.items() if name.startswith(prefix))
    return {name.removeprefix(prefix): tensor for name, tensor in found}


def events_message(events: list[Event], **fields: Any) -> Message:
    """Make the message of a step's events; `events_of` reads it."""
    listed, tensors = [], {}
    for number, event in enumerate(events):
        told = {each.name: getattr(event, each.name) for each in dataclasses.fields(event)}
        if isinstance(event, RunEnded):
            told["error"] = None if event.error is None else error_fields(event.error)
            told["adapter"] = None if event.adapter is None else list(event.adapter)
            for name, tensor in (event.adapter or {}).items():
                tensors[f"{number}/{name}"] = tensor
        listed.append({"kind": type(event).__name__, **told})
    return Message({**fields, "events": listed}, tensors)


def events_of(message: Message) -> list[Event]:
    """Read a message of `events_message`. Raises BadMessage."""
    events: list[Event] = []
    try:
        for number, told in enumerate(message.fields["events"]):
            kind = _EVENTS[told.pop("kind")]
            if kind is RunEnded:
                names = told["adapter"]
                told["adapter"] = names and {n: message.tensors[f"{number}/{n}"] for n in names}
                told["error"] = told["error"] and error_of(told["error"])
            events.append(kind(**told))
    except (KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"its events: {error!r}") from error
    return events


def error_fields(error: TrainingError) -> dict[str, Any]:
    return {"kind": type(error).__name__, "message": error.message, "param": error.param}


def error_of(fields: Mapping[str, Any]) -> TrainingError:
    kinds = {kind.__name__: kind for kind in (RunRefused, RunUnsupported, RunTooLarge)}
    kind = kinds.get(str(fields["kind"]), TrainingError)
    return kind(str(fields["message"]), param=fields["param"])
