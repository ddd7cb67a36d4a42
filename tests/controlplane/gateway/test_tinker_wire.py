"""Passes in protocol buffers, as Tinker's client writes them, and what is refused by name."""

from __future__ import annotations

import struct
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import InvalidRequest
from controlplane.gateway.tinker import wire
from controlplane.gateway.tinker.wire import _field, read_pass, write_passed, write_samples


def tensor(values: list[Any], kind: int, shape: bytes | None = None) -> bytes:
    packed = array("q" if kind == 2 else "f", values).tobytes()
    shape = wire._written(len(values)) if shape is None else shape
    return _field(1, packed) + _field(3, kind) + _field(4, shape)


def row(token_ids: list[int], **tensors: bytes) -> bytes:
    text = _field(1, _field(1, array("i", token_ids).tobytes()))
    inputs = [
        _field(2, _field(1, name.encode()) + _field(2, value)) for name, value in tensors.items()
    ]
    return _field(1, text) + b"".join(inputs)


def message(*rows: bytes, loss: str = "cross_entropy", config: dict[str, float] = {}) -> bytes:  # noqa: B006
    numbers = [
        _field(7, _field(1, name.encode()) + _field(2, _field(1, value)))
        for name, value in config.items()
    ]
    head = _field(1, b"tks-x:train:0") + _field(2, 7) + _field(4, loss.encode())
    return head + b"".join(_field(3, each) for each in rows) + b"".join(numbers)


TARGETS = tensor([4, 5, 6], 2)
ROW = row([3, 4, 5], target_tokens=TARGETS, weights=tensor([0.0, 1.0, 0.5], 1))
POLICY = {"logprobs": tensor([-1.0, -2.0, -3.0], 1), "advantages": tensor([0.0, 1.0, -1.0], 1)}


def test_a_pass_is_read() -> None:
    found = read_pass(message(ROW, ROW))
    assert (found.model_id, found.seq_id, found.is_forward) == ("tks-x:train:0", 7, False)
    rows = found.pass_rows()
    assert (rows.loss, rows.lengths) == ("cross_entropy", [3, 3])
    assert rows.token_ids.tolist() == [3, 4, 5] * 2
    assert rows.targets.tolist() == [4, 5, 6] * 2
    assert rows.weights.tolist() == [0.0, 1.0, 0.5] * 2
    assert type(rows).decode(rows.encode()) == rows
    clips = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    sent = message(row([3, 4, 5], target_tokens=TARGETS, **POLICY), loss="ppo", config=clips)
    policy = read_pass(sent).pass_rows()
    assert (policy.low, policy.high) == (0.9, 1.1)
    assert policy.weights.tolist() == [0.0, 1.0, -1.0]
    assert policy.sampled.tolist() == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize(
    ("sent", "param", "problem"),
    [
        (message(ROW, loss="dro"), "loss_fn", "one of cross_entropy"),
        (message(), "data", "1 to 1024 rows"),
        (message(*[ROW] * 1025), "data", "1 to 1024 rows"),
        (message(ROW, config={"beta": 1.0}), "loss_fn_config", "beta"),
        (message(ROW, loss="ppo"), "data.0.loss_fn_inputs", "is missing"),
        (
            message(row([3], target_tokens=TARGETS)),
            "data.0.loss_fn_inputs",
            "3 values for 1 tokens",
        ),
        (
            message(row([3, 4, 5], target_tokens=TARGETS, mask=POLICY["advantages"])),
            "data.0.loss_fn_inputs",
            "mask is not an input",
        ),
        (
            message(row([3, 4, 5], target_tokens=tensor([4, 5, 2**40], 2))),
            "data.0.loss_fn_inputs",
            "out of range",
        ),
        (
            message(row([3], weights=tensor([float("nan")], 1))),
            "data.0.loss_fn_inputs",
            "not finite",
        ),
        (message(row([3], weights=tensor([1], 2))), "data.0.loss_fn_inputs", "type float32"),
        (
            message(row([3, 4], target_tokens=tensor([4, 5], 2, b"\x01\x02"))),
            "data.0.loss_fn_inputs",
            "one number for each token",
        ),
        (message(_field(1, _field(2, b"png"))), "data.0.model_input", "text alone"),
        (message(b"".join([_field(1, b"")] * 200)), "data.0.model_input", "text alone"),
        (message(row([])), "data.0.model_input", "no tokens"),
        (message(row([0] * 131_073)), "data", "at most 131072 tokens"),
        (b"\x0a\xff\xff", None, "not a message"),
        (b"\x80" * 12, None, "not a message"),
        (_field(1, b"\xff\xfe"), None, "not a message"),
    ],
)
def test_what_is_wrong_is_refused_by_name(sent: bytes, param: str | None, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as refused:
        read_pass(sent).pass_rows()
    assert refused.value.param == param


@given(st.binary(max_size=300), st.integers(0, 200))
def test_any_bytes_are_a_pass_or_are_refused(noise: bytes, at: int) -> None:
    for sent in (noise, message(ROW)[:at] + noise + message(ROW)[at:]):
        try:
            read_pass(sent).pass_rows()
        except InvalidRequest:
            continue


def test_answers_are_written() -> None:
    passed = memoryview(write_passed([2, 1], b"abcdefghijkl", {"loss:sum": 1.5}))
    kind, record, metric = (value for _, value in wire._fields(passed))
    assert bytes(wire._bytes(kind)) == b"TorchLossReturn"
    fields = dict(wire._fields(wire._bytes(record)))
    name, values = wire._entry(fields[2])
    parts = dict(wire._fields(values))
    assert (name, fields[3], bytes(wire._bytes(parts[1]))) == ("logprobs", 2, b"abcdefghijkl")
    assert struct.unpack("<3q", wire._bytes(parts[2])) == (0, 8, 12)
    assert dict(wire._fields(wire._bytes(metric)))[2] == 1.5
    samples = memoryview(write_samples([(True, [1, 300], [-0.5, -1.0])], [float("nan"), -2.0]))
    answer, prompt = (wire._bytes(value) for _, value in wire._fields(samples))
    said = dict(wire._fields(answer))
    assert said[1] == 1
    assert struct.unpack("<2i", wire._bytes(said[2])) == (1, 300)
    assert struct.unpack("<f", prompt[4:])[0] == -2.0
