"""x W^T of FP8 numbers, where each 128 columns of a row of W have a scale of their own.

Checkpoints with a scale for each block of 128 x 128 are read so. The library has no such product
for few rows. The sum over each 128 columns is multiplied by their scale before it is added, in
fp32, as in DeepGEMM (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl

#: Columns of a row of W that share a scale.
GROUP = 128


@jit("num_tokens")
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    groups_ptr,
    out_ptr,
    num_tokens,
    out_width,
    width,
    num_groups,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
):
    # Programs that share a band of W's rows run one after the other: it stays in the L2 cache.
    num_t = tl.cdiv(num_tokens, BLOCK_T)
    num_n = tl.cdiv(out_width, BLOCK_N)
    program = tl.program_id(0)
    band = program // (BAND * num_t)
    height = tl.minimum(num_n - band * BAND, BAND)
    n = (band * BAND + program % (BAND * num_t) % height) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = program % (BAND * num_t) // height * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    inside = n < out_width
    live = t < num_tokens
    weight_ptrs = weight_ptr + n.to(tl.int64)[:, None] * width + k[None, :]
    x_ptrs = x_ptr + t.to(tl.int64)[:, None] * width + k[None, :]
    group_ptrs = groups_ptr + n * num_groups
    product = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for index in range(0, num_groups):
        rest = (index * BLOCK_K + k < width)[None, :]
        w = tl.load(weight_ptrs + index * BLOCK_K, mask=inside[:, None] & rest, other=0.0)
        x = tl.load(x_ptrs + index * BLOCK_K, mask=live[:, None] & rest, other=0.0)
        scale = tl.load(group_ptrs + index, mask=inside, other=0.0)
        product += tl.dot(w, tl.trans(x)) * scale[:, None]
    tl.store(
        out_ptr + t.to(tl.int64)[None, :] * out_width + n[:, None],
        product.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & live[None, :],
    )


def grouped_product_triton(
    x: torch.Tensor, weight: torch.Tensor, groups: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x [T, K], weight [N, K] E4M3, groups [N, G] fp32 -> [T, N]."""
    num_tokens, width = x.shape
    out_width, num_groups = groups.shape
    out = torch.empty(num_tokens, out_width, dtype=dtype, device=x.device)
    block_t = min(128, max(16, next_power_of_2(num_tokens)))
    block_n = 64 if block_t <= 64 else 128
    programs = ceil_div(num_tokens, block_t) * ceil_div(out_width, block_n)
    _grouped_kernel[(programs,)](
        x_ptr=x,
        weight_ptr=weight,
        groups_ptr=groups,
        out_ptr=out,
        num_tokens=num_tokens,
        out_width=out_width,
        width=width,
        num_groups=num_groups,
        BLOCK_T=block_t,
        BLOCK_N=block_n,
        BLOCK_K=GROUP,
        BAND=8,
        num_warps=4 if block_t <= 64 else 8,
        num_stages=4 if block_t <= 64 else 3,
    )
    return out
