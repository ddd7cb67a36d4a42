"""4-bit weights: unpacked and multiplied as plain arithmetic does."""

from __future__ import annotations

import pytest
import torch

from kernels.int4 import (
    Int4Matrix,
    int4_dense_ref,
    int4_dense_triton,
    int4_few_rows_triton,
    int4_linear,
    pack_int4,
    unpack_int4,
)
from tests.kernels.test_triton import assert_near


def make(height: int, width: int, group: int, dtype: torch.dtype, device: str) -> Int4Matrix:
    numbers = torch.randint(0, 16, (height, width))
    scale = (torch.rand(width // group, height) * 0.1 + 0.01).to(dtype)
    zero = torch.randint(0, 16, scale.shape, dtype=torch.uint8)
    return Int4Matrix(pack_int4(numbers), scale, zero).to(device)


def test_packing_has_the_first_number_in_the_lowest_bits() -> None:
    numbers = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15], [0, 0, 0, 0, 0, 0, 0, 8]])
    packed = pack_int4(numbers)
    assert packed.tolist() == [[0xF7654321 - (1 << 32)], [0x80000000 - (1 << 32)]]
    assert torch.equal(unpack_int4(packed), numbers.to(torch.uint8))


@pytest.mark.parametrize("group", [8, 32, 96])
def test_dense(group: int, dtype: torch.dtype, device: str) -> None:
    weight = make(20, 96, group, dtype, device)
    expected = int4_dense_ref(weight)
    numbers = unpack_int4(weight.packed).float()
    column = 50 // group
    value = (numbers[3, 50] - weight.zero[column, 3].float()) * weight.scale[column, 3].float()
    assert expected[3, 50] == value
    assert_near(int4_dense_triton(weight, dtype), expected, dtype)
    assert torch.equal(weight.rows(4, 9).dense().cpu(), weight.dense()[4:9].cpu())


@pytest.mark.parametrize("num_tokens", [1, 19, 70])
@pytest.mark.parametrize("group", [32, 160])
def test_products(num_tokens: int, group: int, dtype: torch.dtype, device: str) -> None:
    weight = make(72, 160, group, dtype, device)
    x = torch.randn(num_tokens, 160, device=device).to(dtype)
    bias = torch.randn(72, device=device).to(dtype)
    expected = x.float() @ int4_dense_ref(weight).T
    assert_near(int4_few_rows_triton(x, weight), expected, dtype)
    assert_near(int4_linear(x, weight, bias), expected + bias.float(), dtype)
