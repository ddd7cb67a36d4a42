"""The scan of a safetensors file for NaN, and what its header is to an upload."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.adapters import tensor_values
from contract.adapters.safetensors_header import DTYPE_BYTES, UPLOAD_MAX_BYTES, read_header
from tests.controlplane.adapters import files


def scan(values: Any, dtype: str) -> bool:
    """What the scan says of one tensor of these bytes."""
    data = values if isinstance(values, bytes) else values.tobytes()
    width = DTYPE_BYTES[dtype]
    content = files.pack({"x": (dtype, (len(data) // width,), data)})
    found = tensor_values.tensors_with_nonfinite(
        io.BytesIO(content), read_header(content, len(content), UPLOAD_MAX_BYTES)
    )
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
