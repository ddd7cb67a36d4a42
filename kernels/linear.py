"""y = x W^T for a few tokens, as fast as W can be read.

With few rows, a general matrix product has too few tiles to use all memory bandwidth. Here each
program reads a narrow band of W once, through a deep pipeline.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton


@jit("num_tokens")
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    num_tokens,
    out_width,
    width,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    inside = (n < out_width)[:, None]
    live = (t < num_tokens)[:, None]
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * width + k[None, :]
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * x_stride + k[None, :]
    product = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            w = tl.load(weight_ptrs + start, mask=inside, other=0.0)
            x = tl.load(x_ptrs + start, mask=live, other=0.0)
        else:
            rest = (start + k < width)[None, :]
            w = tl.load(weight_ptrs + start, mask=inside & rest, other=0.0)
            x = tl.load(x_ptrs + start, mask=live & rest, other=0.0)
        product = tl.dot(w, tl.trans(x), product, input_precision="ieee")
    out_ptrs = out_ptr + t.to(tl.int64)[None, :] * out_width + n[:, None]
    tl.store(
        out_ptrs,
        product.to(out_ptr.dtype.element_ty),
        mask=(n < out_width)[:, None] & (t < num_tokens)[None, :],
    )


def skinny_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    block_n: int = 32,
    block_k: int = 256,
    num_warps: int = 4,
    num_stages: int = 4,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K], weight [N, K] contiguous -> [T, N] in `dtype` (x's); meant for T up to 64."""
    num_tokens, width = x.shape
    out = torch.empty(num_tokens, weight.shape[0], dtype=dtype or x.dtype, device=x.device)
    block_t = min(64, max(16, next_power_of_2(num_tokens)))
    _skinny_kernel[(ceil_div(weight.shape[0], block_n), ceil_div(num_tokens, block_t))](
        x_ptr=x,
        weight_ptr=weight,
        out_ptr=out,
        x_stride=x.stride(0),
        num_tokens=num_tokens,
        out_width=weight.shape[0],
        width=width,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        EVEN_K=width % block_k == 0,
        STAGES=num_stages,
        num_warps=num_warps,
    )
    return out


def linear_ref(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N]."""
    return functional.linear(x, weight)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N], with the kernel for few rows or torch's product.

    The kernel is used where it was faster on an H200 (docs/history/performance.md): for very tall
    weights up to 64 rows of x, and for weights with too few tiles for torch's product up to 16.
    """
    num_tokens, height = x.shape[0], weight.shape[0]
    if not use_triton(x) or num_tokens > 64 or x.dtype == torch.float32:
        return functional.linear(x, weight)
    if height >= 1 << 16:
        if num_tokens == 1:
            return skinny_linear_triton(x, weight, block_n=64, block_k=128)
        return skinny_linear_triton(x, weight, block_n=128, block_k=128, num_warps=8, num_stages=3)
    if num_tokens <= 16 and weight.numel() <= 1 << 25:
        if height <= 4096:
            return skinny_linear_triton(x, weight, block_n=32, block_k=128, num_stages=6)
        return skinny_linear_triton(x, weight, block_n=64, block_k=128)
    return functional.linear(x, weight)
