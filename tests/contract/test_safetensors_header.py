"""The safetensors header, as strangers may write it."""

from __future__ import annotations

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

from contract.adapters import safetensors_header
from contract.adapters.problems import AdapterProblems
from contract.adapters.safetensors_header import ENGINE_MAX_BYTES, UPLOAD_MAX_BYTES, Tensor
from tests.controlplane.adapters import files

TENSORS = files.tensors()
GOOD = files.pack(TENSORS)
DATA = b"".join(data for _, _, data in TENSORS.values())
FIRST = next(iter(TENSORS))


def parse(content: bytes, max_bytes: int = UPLOAD_MAX_BYTES) -> tuple[Tensor, ...]:
    return safetensors_header.read_header(content, len(content), max_bytes)


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
    with pytest.raises(AdapterProblems, match=words) as caught:
        parse(content)
    assert time.process_time() - began < 2
    str(caught.value).encode("ascii")


def test_header_full_of_brackets_costs_little() -> None:
    """The dearest 4 MiB for a JSON parser: two million empty lists."""
    began = time.process_time()
    with pytest.raises(AdapterProblems):
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
    except AdapterProblems as found:
        assert found.problems
    else:
        assert tensors[-1].end == len(content)


@given(st.binary(max_size=400))
@settings(deadline=2000, max_examples=300)
def test_any_bytes_pass_or_are_refused(content: bytes) -> None:
    with pytest.raises(AdapterProblems):
        parse(content)


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
@settings(deadline=2000, max_examples=300)
def test_one_changed_byte_passes_or_is_refused(position: int, change: int) -> None:
    content = bytearray(GOOD)
    content[position] ^= change
    try:
        tensors = parse(bytes(content))
    except AdapterProblems:
        return
    assert tensors[-1].end == len(content)


@pytest.mark.parametrize("length", [0x0280, 0x0380, 0x0480, 0x0580, 0x017B, 0x10280])
def test_a_good_file_may_begin_like_a_pickle(length: int) -> None:
    """The first bytes are the header's length; of 2,048 adapters one was taken for a pickle."""
    text = json.dumps(files.header(files.tensors(targets=("q_proj",), layers=1))).encode()
    body = b"".join(data for _, _, data in files.tensors(targets=("q_proj",), layers=1).values())
    content = files.pack_text(text.ljust(length), body)
    assert len(parse(content)) == 2


def test_a_pickle_is_told_how_to_convert_it() -> None:
    for content in (b"PK\x03\x04" + bytes(100), pickle.dumps({"a": 1}), b"\x80\x02}q\x00."):
        with pytest.raises(
            AdapterProblems, match=r"torch\.load.*weights_only=True.*adapter_model\.safet"
        ):
            safetensors_header.header_length(content, len(content), UPLOAD_MAX_BYTES)


@pytest.mark.parametrize("most", [UPLOAD_MAX_BYTES, ENGINE_MAX_BYTES])
def test_a_header_is_as_long_as_is_allowed(most: int) -> None:
    header = json.dumps(files.header(TENSORS)).encode()
    assert len(parse(files.pack_text(header.ljust(most), DATA), most)) == len(TENSORS)
    with pytest.raises(AdapterProblems, match=f"more than the {most} allowed"):
        parse(files.pack_text(header.ljust(most + 1), DATA), most)
