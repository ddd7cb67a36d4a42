"""The protocol-buffer messages of Tinker's client: passes as it sends them, and two answers.

The few messages are read and written by hand, by their field numbers: only what a field may have is
looked at, nothing is nested deeper than the code here is.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from contract.training.calls import LOSSES, MAX_ROWS, MAX_TOKENS, PassRows
from controlplane.errors import InvalidRequest

_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
_FIXED = {_DOUBLE: 8, _FLOAT: 4}
_FLOAT32, _INT64 = 1, 2
#: Most configuration of a loss, inputs of a row, and pieces of its text.
_MOST = 64
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


class _Broken(ValueError):
    """Raised for bytes that are no message."""


@dataclass(slots=True)
class SentPass:
    """POST /forward_backward."""

    model_id: str = ""
    seq_id: int = 0
    loss: str = ""
    is_forward: bool = False
    config: dict[str, float] = field(default_factory=dict)
    rows: list[_Row] = field(default_factory=list)

    def pass_rows(self) -> PassRows:
        """Return the pass, checked. Raises InvalidRequest naming the field."""
        if self.loss not in LOSSES:
            known = ", ".join(LOSSES)
            raise InvalidRequest(f"The loss must be one of {known}.", param="loss_fn")
        clips = _CLIPS if self.loss == "ppo" else {}
        for name, value in self.config.items():
            if name not in clips or not 0 <= value <= 1000:
                raise InvalidRequest(
                    f"{name}: this loss has no such number. Leave it out.", param="loss_fn_config"
                )
        if not 1 <= len(self.rows) <= MAX_ROWS:
            raise InvalidRequest(f"A call has 1 to {MAX_ROWS} rows.", param="data")
        if sum(len(row.token_ids) for row in self.rows) > MAX_TOKENS:
            raise InvalidRequest(
                f"A call has at most {MAX_TOKENS} tokens: send it in parts.", param="data"
            )
        names = LOSSES[self.loss]
        made = PassRows(
            loss=self.loss,
            low=self.config.get("clip_low_threshold", _CLIPS["clip_low_threshold"]),
            high=self.config.get("clip_high_threshold", _CLIPS["clip_high_threshold"]),
            is_forward=self.is_forward,
            lengths=[len(row.token_ids) for row in self.rows],
            token_ids=array("i"),
            targets=array("i"),
            weights=array("f"),
            sampled=array("f"),
        )
        for number, row in enumerate(self.rows):
            row.check(names, f"data.{number}")
            made.token_ids.extend(row.token_ids)
            made.targets.extend(row.targets)
            made.weights.extend(row.floats[names[-1]])
            made.sampled.extend(row.floats.get("logprobs") or _zeros(len(row.token_ids)))
        return made


@dataclass(slots=True)
class _Row:
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    targets: array[int] = field(default_factory=lambda: array("i"))
    floats: dict[str, array[float]] = field(default_factory=dict)

    def check(self, names: tuple[str, ...], param: str) -> None:
        """Check that the row has its tensors, of its length. Raises InvalidRequest."""
        if "weights" in names:
            ones = array("f", [1.0]) * len(self.token_ids)
            self.floats.setdefault("weights", ones)
        if not self.token_ids:
            raise InvalidRequest("A row has no tokens.", param=f"{param}.model_input")
        for name in {*names, *self.floats}:
            values = self.floats.get(name)
            if values is None or name not in names:
                what = "is missing" if name in names else "is not an input of this loss"
                raise InvalidRequest(f"{name} {what}.", param=f"{param}.loss_fn_inputs")
        counts = {"target_tokens": len(self.targets)}
        for name, count in (counts | {n: len(v) for n, v in self.floats.items()}).items():
            if count != len(self.token_ids):
                raise InvalidRequest(
                    f"{name} has {count} values for {len(self.token_ids)} tokens.",
                    param=f"{param}.loss_fn_inputs",
                )


def _zeros(number: int) -> array[float]:
    return array("f", bytes(4 * number))


def read_pass(sent: bytes) -> SentPass:
    """Read a body of /forward_backward. Raises InvalidRequest."""
    try:
        return _read_pass(memoryview(sent))
    except (_Broken, UnicodeDecodeError) as error:
        raise InvalidRequest("The body is not a message of Tinker's client.") from error


def _read_pass(sent: memoryview) -> SentPass:
    found = SentPass()
    for number, value in _fields(sent):
        if number == 1:
            found.model_id = _text(value)
        elif number == 2:
            found.seq_id = _int(value)
        elif number == 3:
            if len(found.rows) >= MAX_ROWS:
                raise InvalidRequest(f"A call has 1 to {MAX_ROWS} rows.", param="data")
            found.rows.append(_read_row(_bytes(value), f"data.{len(found.rows)}"))
        elif number == 4:
            found.loss = _text(value)
        elif number == 6:
            found.is_forward = bool(_int(value))
        elif number == 7 and len(found.config) < _MOST:  # 5 has a part of it again
            name, given = _entry(value)
            numbers = dict(_fields(given))
            if not isinstance(numbers.get(1), float):
                raise InvalidRequest(f"{name} must be a number.", param="loss_fn_config")
            found.config[name] = numbers[1]  # type: ignore[assignment]
    return found


def _read_row(sent: memoryview, param: str) -> _Row:
    """Read a Datum. Where its tokens came from, by `with_provenance`, changes nothing."""
    row, num_parts = _Row(), 0
    for number, value in _fields(sent):
        num_parts += 1
        if num_parts > 2 * _MOST:
            raise InvalidRequest("A row has too many parts.", param=param)
        if number == 1:
            parts = dict(_fields(_bytes(value)))
            if set(parts) != {1}:
                raise InvalidRequest("A row may have text alone.", param=f"{param}.model_input")
            tokens = dict(_fields(_bytes(parts[1]))).get(1, memoryview(b""))
            row.token_ids.extend(_array("i", _bytes(tokens)))
        elif number == 2:
            name, tensor = _entry(value)
            _read_tensor(row, name[:40], tensor, f"{param}.loss_fn_inputs")
    return row


def _read_tensor(row: _Row, name: str, sent: memoryview, param: str) -> None:
    parts = dict(_fields(sent))
    if 2 in parts or len(_shape(parts.get(4))) > 1:
        raise InvalidRequest(f"{name} must have one number for each token.", param=param)
    kind = _INT64 if name == "target_tokens" else _FLOAT32
    if parts.get(3) != kind:
        what = "int64" if kind == _INT64 else "float32"
        raise InvalidRequest(f"{name} must be of type {what}.", param=param)
    dense = _bytes(parts.get(1, memoryview(b"")))
    if kind == _INT64:
        try:
            row.targets = array("i", _array("q", dense))
        except OverflowError as error:
            raise InvalidRequest(f"{name} has a number out of range.", param=param) from error
        return
    values = array("f", _array("f", dense))
    row.floats[name] = values
    if not all(map(math.isfinite, values)):
        raise InvalidRequest(f"{name} has a number that is not finite.", param=param)


def _shape(value: object) -> list[int]:
    """Return the dimensions of a tensor, which are packed."""
    if not isinstance(value, memoryview):
        return []
    found: list[int] = []
    at = 0
    while at < len(value) and len(found) < 8:
        size, at = _varint(value, at)
        found.append(size)
    return found


def _fields(sent: memoryview) -> Iterator[tuple[int, int | float | memoryview]]:
    """Yield each field of a message: its number and its value."""
    at = 0
    while at < len(sent):
        tag, at = _varint(sent, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(sent, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(sent, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise _Broken
        piece, at = sent[at : at + size], at + size
        if len(piece) < size:
            raise _Broken
        if kind == _BYTES:
            yield number, piece
        else:
            yield number, struct.unpack("<d" if kind == _DOUBLE else "<f", piece)[0]


def _varint(sent: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(sent) and shift < 70:
        byte = sent[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise _Broken


def _bytes(value: object) -> memoryview:
    if not isinstance(value, memoryview):
        raise _Broken
    return value


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise _Broken
    return value


def _text(value: object) -> str:
    return bytes(_bytes(value)).decode()[:200]


def _entry(value: object) -> tuple[str, memoryview]:
    """Return the key and the value of a map's entry."""
    parts = dict(_fields(_bytes(value)))
    return _text(parts.get(1)), _bytes(parts.get(2))


def _array(kind: str, sent: memoryview) -> array[int]:
    found: array[int] = array(kind)
    if len(sent) % found.itemsize:
        raise _Broken
    found.frombytes(sent)
    return found


def _field(number: int, value: int | float | bytes) -> bytes:
    """Return a field as a message has it; of numbers, floats as doubles."""
    if isinstance(value, float):
        return _written(number << 3 | _DOUBLE) + struct.pack("<d", value)
    if isinstance(value, int):
        return _written(number << 3) + _written(value)
    return _written(number << 3 | _BYTES) + _written(len(value)) + value


def _written(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def write_passed(lengths: Iterable[int], logprobs: bytes, metrics: dict[str, float]) -> bytes:
    """Return a ForwardBackwardOutput: the log-probabilities of each row, and the metrics."""
    offsets = array("q", [0])
    for length in lengths:
        offsets.append(offsets[-1] + 4 * length)
    tensor = _field(1, logprobs) + _field(2, offsets.tobytes()) + _field(3, _FLOAT32)
    record = _field(2, _field(1, b"logprobs") + _field(2, tensor)) + _field(3, len(offsets) - 1)
    told = (
        _field(3, _field(1, name.encode()) + _field(2, float(value)))
        for name, value in metrics.items()
    )
    return _field(1, b"TorchLossReturn") + _field(2, record) + b"".join(told)


def write_samples(
    samples: Iterable[tuple[bool, list[int], list[float]]], prompt: list[float] | None
) -> bytes:
    """Return a SampleResponse: whether each answer was cut, its tokens and log-probabilities.

    prompt  log-probabilities of the prompt's tokens, NaN where there is none
    """
    out = b""
    for is_cut, token_ids, logprobs in samples:
        answer = _field(1, int(is_cut)) + _field(2, array("i", token_ids).tobytes())
        out += _field(1, answer + _field(3, array("f", logprobs).tobytes()))
    return out if prompt is None else out + _field(2, array("f", prompt).tobytes())
