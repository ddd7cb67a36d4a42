"""The safetensors header, as strangers may write it, and the scan for NaN."""

from __future__ import annotations

import io
import json
import pickle
import struct
import time
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.adapters import tensor_file
from controlplane.adapters.rejection import Rejected
from tests.controlplane.adapters import files

TENSORS = files.tensors()
GOOD = files.pack(TENSORS)
DATA = b"".join(data for _, _, data in TENSORS.values())
FIRST = next(iter(TENSORS))


def parse(content: bytes) -> tuple[tensor_file.Tensor, ...]:
    return tensor_file.parse_header(content, len(content))


def spoiled(**entry: Any) -> bytes:
    """The good file, its first tensor's header entry changed."""
    entries = files.header(TENSORS)
    entries[FIRST].update(entry)
    return files.pack(TENSORS, entries)


def test_reads_what_safetensors_writes() -> None:
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.ones((4, 1), dtype=np.float16),
    }
    content = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    tensors = parse(content)
    assert {t.name: (t.dtype, t.shape) for t in tensors} == {
        "a": ("F16", (4, 1)),
        "b": ("F32", (2, 3)),
    }
    for tensor in tensors:
        assert content[tensor.begin : tensor.end] == arrays[tensor.name].tobytes()


def test_what_passes_here_safetensors_reads_too() -> None:
    loaded = safetensors.numpy.load(GOOD)
    assert set(loaded) == {tensor.name for tensor in parse(GOOD)}


def second_twice() -> bytes:
    entries = files.header(TENSORS)
    names = list(TENSORS)
    entries[names[1]] = entries[names[0]]
    return files.pack(TENSORS, entries)


def with_gap() -> bytes:
    entries = files.header(TENSORS)
    del entries[list(TENSORS)[1]]
    return files.pack(TENSORS, entries)


def text(header: bytes) -> bytes:
    return files.pack_text(header, DATA)


BAD = {
    "empty": (b"", "too short"),
    "seven bytes": (b"\x01" * 7, "too short"),
    "zip": (b"PK\x03\x04" + GOOD, "zip archive"),
    "pickle": (b"\x80\x02}q\x00." + GOOD, "pickle"),
    "gguf": (b"GGUF" + GOOD, "GGUF"),
    "json": (b'{"a": 1}' + GOOD, "JSON"),
    "length of 2**63": (struct.pack("<Q", 2**63) + GOOD[8:], "claims"),
    "length of 5 MB": (struct.pack("<Q", 5 << 20) + bytes(6 << 20), "claims"),
    "length past the end": (struct.pack("<Q", len(GOOD)) + GOOD[8:], "truncated"),
    "length of zero": (bytes(8), "not a JSON object"),
    "truncated data": (GOOD[:-1], "truncated"),
    "bytes after the data": (GOOD + b"\0", "followed by other bytes"),
    "not utf-8": (text(b'{"\xff": 1}'), "not JSON"),
    "not json": (text(b"{'a': 1}"), "not JSON"),
    "list": (text(b"[]"), "not a JSON object"),
    "leading space": (text(b" {}"), "not a JSON object"),
    "nothing inside": (text(b"{}"), "no tensor"),
    "metadata only": (text(b'{"__metadata__": {}}'), "no tensor"),
    "metadata of numbers": (text(b'{"__metadata__": {"a": 1}, "x": {}}'), "__metadata__"),
    "deep": (text(b'{"a":' + b"[" * 200_000), "nested too deeply"),
    "deep objects": (text(b'{"a":' * 200_000), "nested too deeply"),
    "nan": (text(b'{"a": NaN}'), "not JSON"),
    "duplicate tensor": (
        text(json.dumps(files.header(TENSORS)).encode()[:-1] + b', "%s": {}}' % FIRST.encode()),
        "twice",
    ),
    "duplicate field": (text(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "twice"),
    "entry not an object": (text(b'{"a": 1}'), "needs dtype"),
    "entry without offsets": (text(b'{"a": {"dtype": "F32", "shape": [1]}}'), "needs dtype"),
    "extra field": (spoiled(code="x"), "needs dtype"),
    "overlap": (second_twice(), "overlaps"),
    "gap": (with_gap(), "gap"),
    "integers": (spoiled(dtype="I64"), "dtype"),
    "dtype a list": (spoiled(dtype=["F32"]), "dtype"),
    "shape too small": (spoiled(shape=[4, 15]), "which its shape"),
    "shape of strings": (spoiled(shape=["4", "16"]), "not a list of sizes"),
    "shape of booleans": (spoiled(shape=[True, 64]), "not a list of sizes"),
    "shape with zero": (spoiled(shape=[0, 16]), "not a list of sizes"),
    "negative shape": (spoiled(shape=[-4, -16]), "not a list of sizes"),
    "overflowing shape": (spoiled(shape=[2**31, 2**31, 2**31]), "which its shape"),
    "huge number": (spoiled(shape=[10**4000, 1]), "not a list of sizes"),
    "number too long to read": (text(b'{"a": ' + b"1" * 100_000 + b"}"), "not JSON"),
    "many dimensions": (spoiled(shape=[1] * 100_000), "not a list of sizes"),
    "offsets reversed": (spoiled(data_offsets=[256, 0]), "data_offsets"),
    "three offsets": (spoiled(data_offsets=[0, 1, 2]), "data_offsets"),
    "negative offset": (spoiled(data_offsets=[-1, 255]), "data_offsets"),
    "offsets past the end": (spoiled(data_offsets=[2**40, 2**40 + 256]), "overlap|gap"),
}


@pytest.mark.parametrize(("content", "words"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_with_the_reason(content: bytes, words: str) -> None:
    began = time.process_time()
    with pytest.raises(Rejected, match=words) as caught:
        parse(content)
    assert time.process_time() - began < 2
    json.dumps(caught.value.as_json()).encode("ascii")


def test_header_full_of_brackets_costs_little() -> None:
    """The dearest 4 MiB for a JSON parser: two million empty lists."""
    began = time.process_time()
    with pytest.raises(Rejected):
        parse(text(b'{"a":[' + b"[]," * 1_398_000 + b"[]]}"))
    assert time.process_time() - began < 10


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)
_entry = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", "", 1]),
        "shape": st.lists(st.integers(-1, 9) | st.integers(), max_size=4) | _json,
        "data_offsets": st.lists(st.integers(-1, 400) | st.integers(), max_size=3) | _json,
    },
)


@given(st.dictionaries(st.text(max_size=8), _entry | _json, max_size=5), st.binary(max_size=300))
@settings(deadline=2000, max_examples=300)
def test_any_header_passes_or_is_refused(entries: dict[str, Any], data: bytes) -> None:
    content = files.pack_text(json.dumps(entries).encode(), data)
    try:
        tensors = parse(content)
    except Rejected as rejected:
        assert rejected.reasons
    else:
        assert tensors[-1].end == len(content)


@given(st.binary(max_size=400))
@settings(deadline=2000, max_examples=300)
def test_any_bytes_pass_or_are_refused(content: bytes) -> None:
    with pytest.raises(Rejected):
        parse(content)


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
@settings(deadline=2000, max_examples=300)
def test_one_changed_byte_passes_or_is_refused(position: int, change: int) -> None:
    content = bytearray(GOOD)
    content[position] ^= change
    try:
        tensors = parse(bytes(content))
    except Rejected:
        return
    assert tensors[-1].end == len(content)


def scan(values: Any, dtype: str) -> bool:
    """What the scan says of one tensor of these bytes."""
    data = values if isinstance(values, bytes) else values.tobytes()
    width = tensor_file.DTYPE_BYTES[dtype]
    content = files.pack({"x": (dtype, (len(data) // width,), data)})
    found = tensor_file.tensors_with_nonfinite(io.BytesIO(content), parse(content))
    return bool(list(found))


@pytest.mark.parametrize("dtype", ["F16", "F32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 262_143, 262_144, 299_999])
def test_scan_finds_one_bad_number_anywhere(dtype: str, bad: float, place: int) -> None:
    values = np.ones(300_000, dtype={"F16": np.float16, "F32": np.float32}[dtype])
    assert not scan(values, dtype)
    values[place] = bad
    assert scan(values, dtype)


@given(st.binary(min_size=4, max_size=64))
def test_scan_agrees_with_numpy(data: bytes) -> None:
    data = data[: len(data) // 4 * 4]
    assert scan(data, "F32") == (not np.isfinite(np.frombuffer(data, "<f4")).all())
    assert scan(data, "F16") == (not np.isfinite(np.frombuffer(data, "<f2")).all())
    # BF16 is the upper half of an F32.
    widened = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    assert scan(data, "BF16") == (not np.isfinite(widened).all())


@pytest.mark.parametrize("half", range(65536 // 4096))
def test_scan_is_right_for_every_half_precision_number(half: int) -> None:
    for bits in range(half * 4096, (half + 1) * 4096, 7):
        word = struct.pack("<H", bits)
        assert scan(word, "F16") == (bits & 0x7C00 == 0x7C00)
        assert scan(word, "BF16") == (bits & 0x7F80 == 0x7F80)


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580, 0x017B, 0x10280])
def test_a_good_file_may_begin_like_a_pickle(length: int) -> None:
    """The first bytes are the header's length; of 2,048 adapters one was taken for a pickle."""
    text = json.dumps(files.header(files.tensors(targets=("q_proj",), layers=1))).encode()
    body = b"".join(data for _, _, data in files.tensors(targets=("q_proj",), layers=1).values())
    content = files.pack_text(text.ljust(length), body)
    assert len(tensor_file.parse_header(content, len(content))) == 2


def test_a_pickle_is_told_how_to_convert_it() -> None:
    for content in (b"PK\x03\x04" + bytes(100), pickle.dumps({"a": 1}), b"\x80\x02}q\x00."):
        with pytest.raises(Rejected, match=r"torch\.load.*weights_only=True.*adapter_model\.safet"):
            tensor_file.header_length(content, len(content))
