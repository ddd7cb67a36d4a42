"""What watches the other tests' kernels sees an access outside of their tensors."""

from __future__ import annotations

import os

import pytest
import torch

from kernels.backend import jit, tl

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="it watches the interpreter"
)


@jit()
def _copy_kernel(from_ptr, to_ptr, count, limit, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(from_ptr + i, mask=i < count, other=0)
    tl.store(to_ptr + i, values, mask=i < limit)


@jit()
def _count_kernel(count_ptr, place):
    tl.atomic_add(count_ptr + place, 1)


def _copy(count: int, limit: int) -> torch.Tensor:
    memory = torch.arange(24)
    source, target = memory[:8], memory[16:]
    _copy_kernel[(1,)](from_ptr=source, to_ptr=target, count=count, limit=limit, BLOCK=16)
    return target


def test_what_lies_in_the_tensors_passes() -> None:
    assert _copy(8, 8).tolist() == list(range(8))


@pytest.mark.parametrize(("count", "limit"), [(9, 8), (8, 9)])
def test_an_access_past_a_tensor_stops_the_kernel(count: int, limit: int) -> None:
    """Also where the same storage goes on behind it."""
    with pytest.raises(Exception, match="1 of 9 addresses are in no tensor"):
        _copy(count, limit)


def test_an_atomic_past_a_tensor_stops_the_kernel() -> None:
    counts = torch.zeros(2, dtype=torch.int32)
    _count_kernel[(1,)](count_ptr=counts, place=1)
    assert counts.tolist() == [0, 1]
    with pytest.raises(Exception, match="in no tensor"):
        _count_kernel[(1,)](count_ptr=counts, place=2)
