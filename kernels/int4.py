"""Weights in 4 bits: whole numbers 0 to 15, with a scale and a zero for each group of columns.

A weight is (number - zero) * scale; activations stay as they are (W4A16). For few rows a kernel
unpacks the weight as it multiplies, which takes longer than to read it. For many rows the weight is
unpacked once, and the library multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton

#: Numbers in one int32: the first is in the lowest bits.
PACKED = 8

# Rows of x up to which the weight is unpacked inside the product: of one that is wider than tall,
# and of others, which have enough programs for more.
_FEW_ROWS_WIDE, _FEW_ROWS = 64, 128

# Height from which on programs of 64 rows fill a GPU.
_TALL = 1 << 14

#: The bits of 1.0 in fp32.
_ONE = 127 << 23

#: The least columns of a group that the product of few rows has a block of.
_LEAST_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A weight [N, K].

    packed  [N, K / 8] int32: numbers of a row, eight in each
    scale   [G, N] of a floating type, for K / G columns each
    zero    [G, N] uint8
    """

    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.packed.shape[0], self.packed.shape[1] * PACKED))

    @property
    def group(self) -> int:
        """Return the number of columns that share a scale."""
        return self.shape[1] // self.scale.shape[0]

    def to(self, device: str | torch.device) -> Int4Matrix:
        """Return the matrix on a device."""
        return Int4Matrix(*(each.to(device) for each in (self.packed, self.scale, self.zero)))

    def rows(self, low: int, high: int) -> Int4Matrix:
        """Return the rows from `low` to before `high`; they share this one's memory."""
        return Int4Matrix(self.packed[low:high], self.scale[:, low:high], self.zero[:, low:high])

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """-> [N, K], computed in fp32 and rounded once to `dtype`"""
        if use_triton(self.packed):
            return int4_dense_triton(self, dtype)
        return int4_dense_ref(self).to(dtype)


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers 0 to 15 [N, K], K a multiple of 8 -> [N, K / 8] int32."""
    parts = numbers.to(torch.int64).view(len(numbers), -1, PACKED)
    shifts = torch.arange(0, 4 * PACKED, 4, device=numbers.device)
    whole = (parts << shifts).sum(dim=-1)
    signed: torch.Tensor = whole - ((whole >> 31) << 32)
    return signed.to(torch.int32)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """[N, K / 8] int32 -> numbers 0 to 15 [N, K] uint8."""
    shifts = torch.arange(0, 4 * PACKED, 4, device=packed.device)
    return ((packed[..., None] >> shifts) & 15).to(torch.uint8).flatten(1)


def int4_dense_ref(weight: Int4Matrix) -> torch.Tensor:
    """-> [N, K] fp32"""
    groups, height = weight.scale.shape
    numbers = unpack_int4(weight.packed).view(height, groups, weight.group).float()
    wide: torch.Tensor = numbers - weight.zero.T[..., None].float()
    return (wide * weight.scale.T[..., None].float()).flatten(1)


@jit()
def _values(word, one, zero, scale):
    """Return the weights of the numbers in bits 12 to 15 of each word, and of those in 16 to 19.

    A number n becomes fp32 without a conversion, which a card does at a quarter of the speed: as
    the last bits of 2^11 + n, and of 2^7 + n. Both it and the zero are multiplied exactly.

    one  the bits of 1.0, which a kernel is given, since of two constants the compiler would make
         two operations: one takes the number's bits, one adds the exponent's
    """
    low = ((word & 0xF000) | (one + (11 << 23))).to(tl.float32, bitcast=True)
    high = ((word & 0xF0000) | (one + (7 << 23))).to(tl.float32, bitcast=True)
    low = low * scale[:, None] - ((zero + 2048.0) * scale)[:, None]
    return low, high * scale[:, None] - ((zero + 128.0) * scale)[:, None]


@jit()
def _load_scales(scale_ptr, zero_ptr, n, start, height, width, stride, GROUP: tl.constexpr):
    """Load the scale and the zero, [BLOCK_N] fp32, of the group that has a column."""
    place = (start // GROUP) * stride + n
    mask = (n < height) & (start < width)
    scale = tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return scale, tl.load(zero_ptr + place, mask=mask, other=0).to(tl.float32)


@jit()
def _load_weight(packed_ptr, n, start, height, num_packed, scale, zero, one, BLOCK_K: tl.constexpr):
    """Load [BLOCK_N, BLOCK_K] of the weight in fp32: rows n, columns from `start` on.

    The eight numbers of a word stay in the thread that loaded it.
    """
    place = start // 8 + tl.arange(0, BLOCK_K // 8)
    mask = (n < height)[:, None] & (place < num_packed)[None, :]
    rows = packed_ptr + n.to(tl.int64)[:, None] * num_packed
    word = tl.load(rows + place[None, :], mask=mask, other=0)
    n0, n1 = _values(word << 12, one, zero, scale)
    n2, n3 = _values(word << 4, one, zero, scale)
    n4, n5 = _values(word >> 4, one, zero, scale)
    n6, n7 = _values(word >> 12, one, zero, scale)
    even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
    odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
    return tl.reshape(tl.join(even, odd), (n.shape[0], BLOCK_K))


@jit()
def _dense_kernel(
    packed_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    height,
    width,
    num_packed,
    stride,
    one,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    k = start + tl.arange(0, BLOCK_K)
    scale, zero = _load_scales(scale_ptr, zero_ptr, n, start, height, width, stride, GROUP)
    weight = _load_weight(packed_ptr, n, start, height, num_packed, scale, zero, one, BLOCK_K)
    out_ptrs = out_ptr + n.to(tl.int64)[:, None] * width + k[None, :]
    mask = (n < height)[:, None] & (k < width)[None, :]
    tl.store(out_ptrs, weight.to(out_ptr.dtype.element_ty), mask=mask)


def _block(weight: Int4Matrix, most: int) -> int:
    """Return the columns of a block: a power of two that divides the group."""
    return min(weight.group & -weight.group, most)


def int4_dense_triton(weight: Int4Matrix, dtype: torch.dtype) -> torch.Tensor:
    """-> [N, K]"""
    height, width = weight.shape
    out = torch.empty(height, width, dtype=dtype, device=weight.packed.device)
    block_n, block_k = 16, _block(weight, 256)
    _dense_kernel[(ceil_div(height, block_n), ceil_div(width, block_k))](
        packed_ptr=weight.packed,
        scale_ptr=weight.scale,
        zero_ptr=weight.zero,
        out_ptr=out,
        height=height,
        width=width,
        num_packed=weight.packed.shape[1],
        stride=weight.scale.stride(0),
        one=_ONE,
        GROUP=weight.group,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out


@jit("num_tokens")
def _few_rows_kernel(
    x_ptr,
    packed_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    num_tokens,
    height,
    width,
    num_packed,
    stride,
    one,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = t < num_tokens
    x_rows = x_ptr + t.to(tl.int64)[:, None] * width
    product = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    # Scales are loaded one block ahead: loads as small as theirs are not pipelined.
    scale, zero = _load_scales(scale_ptr, zero_ptr, n, 0, height, width, stride, GROUP)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        weight = _load_weight(packed_ptr, n, start, height, num_packed, scale, zero, one, BLOCK_K)
        after = start + BLOCK_K
        scale, zero = _load_scales(scale_ptr, zero_ptr, n, after, height, width, stride, GROUP)
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + k[None, :], mask=live[:, None] & (k < width)[None, :], other=0.0)
        product = tl.dot(weight.to(x.dtype), tl.trans(x), product, input_precision="ieee")
    tl.store(
        out_ptr + t.to(tl.int64)[None, :] * height + n[:, None],
        product.to(out_ptr.dtype.element_ty),
        mask=(n < height)[:, None] & live[None, :],
    )


def _tile(block_t: int, height: int) -> tuple[int, int, int]:
    """Return (rows of the weight, warps, stages) of a program; measured on an H200 (8B shape)."""
    if block_t == 128:
        return 64, 4, 3
    if block_t == 64:
        return (128, 8, 3) if height >= _TALL else (64, 8, 4)
    return (64 if height >= _TALL else 32), 4, 4


def int4_few_rows_triton(x: torch.Tensor, weight: Int4Matrix) -> torch.Tensor:
    """x [T, K] contiguous -> x W^T [T, N]; each weight is rounded to x's type."""
    num_tokens, (height, width) = x.shape[0], weight.shape
    out = torch.empty(num_tokens, height, dtype=x.dtype, device=x.device)
    block_t = min(128, max(16, next_power_of_2(num_tokens)))
    block_n, num_warps, num_stages = _tile(block_t, height)
    _few_rows_kernel[(ceil_div(height, block_n), ceil_div(num_tokens, block_t))](
        x_ptr=x,
        packed_ptr=weight.packed,
        scale_ptr=weight.scale,
        zero_ptr=weight.zero,
        out_ptr=out,
        num_tokens=num_tokens,
        height=height,
        width=width,
        num_packed=weight.packed.shape[1],
        stride=weight.scale.stride(0),
        one=_ONE,
        GROUP=weight.group,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=_block(weight, 256 // x.element_size()),
        STAGES=num_stages,
        num_warps=num_warps,
    )
    return out


def int4_linear(
    x: torch.Tensor, weight: Int4Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, K] -> x W^T + b [T, N]"""
    height, width = weight.shape
    few = _FEW_ROWS if height >= width else _FEW_ROWS_WIDE
    if use_triton(x) and x.shape[0] <= few and _block(weight, _LEAST_BLOCK) == _LEAST_BLOCK:
        out = int4_few_rows_triton(x, weight)
        return out if bias is None else out.add_(bias)
    return functional.linear(x, weight.dense(x.dtype), bias)
