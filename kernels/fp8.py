"""Weights and activations in FP8: E4M3 numbers, and a scale for each row of a matrix.

A product multiplies the numbers alone, by the library, which is fastest without scales. Whoever
reads it (the norm, RoPE, SiLU * mul) multiplies by the scale of its row and of its column on the
way. Whoever writes an activation quantises it on the way. The format is E4M3 of the OCP's OFP8,
whose largest value is 448.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton
from kernels.fp8_groups import GROUP, grouped_product_triton
from kernels.linear import skinny_linear_triton

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

#: Rows from which on programs fill a GPU several times.
_MANY_ROWS = 1024

#: Width from which on the library's product of few rows is faster by more than sharing gains.
_WIDE = 8192

#: The least value that counts as a row's largest, so that rows of zeros have a scale.
_LEAST = 1e-12


class Scales(NamedTuple):
    """The factors that a product [T, N] of FP8 numbers still has to be multiplied by.

    rows     [T] fp32, the activation's
    columns  [N] fp32, the weight's
    """

    rows: torch.Tensor
    columns: torch.Tensor


class Fp8Rows(NamedTuple):
    """An activation [T, K]: row t is numbers[t] * scale[t].

    numbers  [T, K] E4M3
    scale    [T] fp32
    """

    numbers: torch.Tensor
    scale: torch.Tensor

    def dense(self) -> torch.Tensor:
        """-> [T, K] fp32"""
        return self.numbers.float() * self.scale[:, None]


class Activation(NamedTuple):
    """The input of linears, [T, K].

    plain  for matrices that are not in FP8, and for adapters; None: nobody reads it
    fp8    the same quantised; None: nobody reads it
    """

    plain: torch.Tensor | None
    fp8: Fp8Rows | None = None

    @property
    def given(self) -> torch.Tensor:
        """`plain`, where it must be there."""
        assert self.plain is not None
        return self.plain

    @property
    def num_rows(self) -> int:
        return len(self.given) if self.fp8 is None else len(self.fp8.scale)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A weight [N, K]: row n is numbers[n] * scale[n], and times groups[n], if there are any.

    numbers      [N, K] E4M3, contiguous
    scale        [N] fp32
    input_scale  [1] fp32, by which the checkpoint scales every activation; None: each row of an
                 activation gets a scale of its own
    groups       [N, G] fp32, a scale for each GROUP columns
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None = None
    groups: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def to(self, device: str | torch.device) -> Fp8Matrix:
        """Return the matrix on a device."""
        optional = (
            None if each is None else each.to(device) for each in (self.input_scale, self.groups)
        )
        return Fp8Matrix(self.numbers.to(device), self.scale.to(device), *optional)

    def rows(self, low: int, high: int) -> Fp8Matrix:
        """Return the rows from `low` to before `high`; they share this one's memory."""
        groups = None if self.groups is None else self.groups[low:high]
        return Fp8Matrix(self.numbers[low:high], self.scale[low:high], self.input_scale, groups)

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """-> [N, K], the values that the product multiplies by; rounded once to `dtype`"""
        wide = self._grouped() * self.scale[:, None]
        return wide.to(dtype)

    def _grouped(self) -> torch.Tensor:
        """Return the numbers times the scales of their groups."""
        wide = self.numbers.float()
        if self.groups is None:
            return wide
        return wide * self.groups.repeat_interleave(GROUP, dim=1)[:, : wide.shape[1]]

    def times(
        self, x: torch.Tensor, dtype: torch.dtype, *, is_shared: bool = False
    ) -> torch.Tensor:
        """x [T, K] E4M3 -> the product of the numbers [T, N], which lacks `scale`.

        is_shared  whether other kernels are to run beside it
        """
        if not use_triton(x):
            return (x.float() @ self._grouped().T).to(dtype)
        if self.groups is not None:
            return grouped_product_triton(x, self.numbers, self.groups, dtype)
        if is_shared and len(x) <= 64 and dtype != torch.float32 and x.shape[1] <= _WIDE:
            # The library's kernel would hold the multiprocessors' shared memory from end to end:
            # 4.9 ms a step instead of 4.6 with 64 rows of one adapter (8B shape, an H200).
            is_tall = len(x) > 16 and len(self.numbers) >= 1 << 14
            block_k, num_stages = (128, 6) if is_tall else (256, 4)
            return skinny_linear_triton(
                x, self.numbers, dtype=dtype, block_n=64, block_k=block_k, num_stages=num_stages
            )
        one = _one(x.device)
        # Fast accumulation keeps some 14 bits of a sum, which bfloat16 does not show; it makes long
        # passes 7% faster.
        is_fast = dtype != torch.float32
        return torch._scaled_mm(
            x, self.numbers.t(), one, one, out_dtype=dtype, use_fast_accum=is_fast
        )


def quantize_rows_ref(x: torch.Tensor, fixed: torch.Tensor | None = None) -> Fp8Rows:
    """Quantise x [T, K] by rows: the largest of a row becomes 448.

    fixed  [1] fp32: the scale of every row, whose values beyond 448 scales are cut off
    """
    wide = x.float()
    if fixed is None:
        scale = wide.abs().amax(dim=-1).clamp(min=_LEAST) / FP8_MAX
    else:
        scale = fixed.float().expand(len(x)).contiguous()
    numbers = (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return Fp8Rows(numbers, scale)


def quantize_tensor(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return x's numbers in E4M3, contiguous, and the scale of all of them."""
    wide = x.float()
    scale = max(float(wide.abs().max()), _LEAST) / FP8_MAX
    return (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).contiguous(), scale


def quantize_matrix(weight: torch.Tensor) -> Fp8Matrix:
    """Quantise a weight [N, K], a scale per row."""
    return Fp8Matrix(*quantize_rows_ref(weight))


@jit()
def scale_and_quantize(x, fixed_ptr, HAS_FIXED: tl.constexpr):
    """x [BLOCK] fp32, a whole row -> (its numbers in E4M3, its scale)."""
    if HAS_FIXED:
        scale = tl.load(fixed_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / 448.0
    numbers = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    return numbers.to(tl.float8e4nv), scale


@jit()
def quantize_finished(
    x_row,
    numbers_row,
    scale_ptr,
    fixed_ptr,
    finished_ptr,
    width,
    K: tl.constexpr,
    HAS_FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count a finished part of a row; the last of its K parts quantises the whole."""
    tl.debug_barrier()  # all threads have stored their part before one thread counts it
    if tl.atomic_add(finished_ptr, 1, sem="acq_rel") == K - 1:
        columns = tl.arange(0, BLOCK)
        mask = columns < width
        x = tl.load(x_row + columns, mask=mask, other=0.0, cache_modifier=".cg")
        numbers, scale = scale_and_quantize(x.to(tl.float32), fixed_ptr, HAS_FIXED)
        tl.store(numbers_row + columns, numbers, mask=mask)
        tl.store(scale_ptr, scale)
        tl.store(finished_ptr, 0)  # for the next launch


@jit("width")
def _quantize_kernel(
    x_ptr, numbers_ptr, scale_ptr, fixed_ptr, width, HAS_FIXED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    numbers, scale = scale_and_quantize(x, fixed_ptr, HAS_FIXED)
    tl.store(numbers_ptr + row * width + columns, numbers, mask=mask)
    tl.store(scale_ptr + row, scale)


def empty_rows(x: torch.Tensor, width: int | None = None) -> Fp8Rows:
    """Return room for the quantised x [T, K], or for [T, width]."""
    shape = x.shape[0], width or x.shape[1]
    numbers = torch.empty(shape, dtype=FP8, device=x.device)
    return Fp8Rows(numbers, torch.empty(shape[0], dtype=torch.float32, device=x.device))


def quantize_rows_triton(x: torch.Tensor, fixed: torch.Tensor | None = None) -> Fp8Rows:
    """Launch one program per row; x [T, K] is contiguous."""
    out, block = empty_rows(x), next_power_of_2(x.shape[1])
    _quantize_kernel[(x.shape[0],)](
        x_ptr=x,
        numbers_ptr=out.numbers,
        scale_ptr=out.scale,
        fixed_ptr=out.scale if fixed is None else fixed,
        width=x.shape[1],
        HAS_FIXED=fixed is not None,
        BLOCK=block,
        # With many rows, few warps: 0.23 ms after 0.35 for [16384, 14336] on an H200.
        num_warps=min(max(block // 512, 1), 16 if x.shape[0] < _MANY_ROWS else 4),
    )
    return out


@jit("num_tokens")
def _apply_scales_kernel(
    y_ptr, rows_ptr, columns_ptr, bias_ptr, num_tokens, width, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    place = y_ptr + row * width + columns
    y = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    y *= tl.load(rows_ptr + row) * tl.load(columns_ptr + columns, mask=mask, other=0.0)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, y.to(y_ptr.dtype.element_ty), mask=mask)


def apply_scales_triton(
    y: torch.Tensor, scales: Scales, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply y [T, N] by its scales and add a bias [N], in place; -> y

    For the few readers that cannot do so themselves.
    """
    block = min(1024, next_power_of_2(y.shape[1]))
    _apply_scales_kernel[(y.shape[0], ceil_div(y.shape[1], block))](
        y_ptr=y,
        rows_ptr=scales.rows,
        columns_ptr=scales.columns,
        bias_ptr=y if bias is None else bias,
        num_tokens=y.shape[0],
        width=y.shape[1],
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=4,
    )
    return y


def fp8_linear_ref(x: torch.Tensor, weight: Fp8Matrix) -> torch.Tensor:
    """x [T, K] -> x W^T [T, N] in fp32, x quantised as `weight` says."""
    return quantize_rows_ref(x, weight.input_scale).dense() @ weight.dense().T


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), device=device, dtype=torch.float32)


def fp8_product(
    x: Fp8Rows, weight: Fp8Matrix, dtype: torch.dtype, *, is_shared: bool = False
) -> tuple[torch.Tensor, Scales]:
    """x [T, K], weight [N, K] -> (the product of their numbers [T, N], what it lacks).

    dtype      of the product; float16 is too small for it
    is_shared  whether other kernels are to run beside it
    """
    return weight.times(x.numbers, dtype, is_shared=is_shared), Scales(x.scale, weight.scale)
