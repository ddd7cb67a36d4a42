"""The slow, obvious forms of this package's operations, differentiable by autograd alone."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional

from kernels.training.pools import LoraSite
from kernels.training.segments import Rows, Segments


def lora_linear_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    site: LoraSite,
    values: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    """y = x W^T + bias + scale * (x A^T) B^T of each token's own run; `values` the pool."""
    runs = []
    for run, (start, end) in enumerate(itertools.pairwise(segments.bounds)):
        own, modules = x[start:end], []
        for m, (low, high) in enumerate(itertools.pairwise(site.bounds)):
            rank, width = int(site.rank[m, run]), x.shape[1]
            a_start, b_start = int(site.a[m, run]), int(site.b[m, run])
            a = values[a_start : a_start + rank * width].view(rank, width)
            b = values[b_start : b_start + rank * (high - low)].view(high - low, rank)
            modules.append((own @ a.T) @ b.T * site.scale[m, run].to(x.dtype))
        runs.append(torch.cat(modules, dim=1))
    return functional.linear(x, weight, bias) + torch.cat(runs)


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Hugging Face's LlamaRMSNorm, in x's own type."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rope_ref(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Hugging Face's apply_rotary_pos_emb of x [T, heads, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[positions][:, None].to(x.dtype) + turned * sin[positions][:, None].to(x.dtype)


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], gate first -> silu(gate) * up."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Softmax over every pair of tokens, those of other rows and later ones left out."""
    row = torch.bucketize(torch.arange(q.shape[0], device=q.device), rows.starts[1:], right=True)
    distance = rows.positions[:, None] - rows.positions[None, :]
    seen = (row[:, None] == row[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


def answer_loss_ref(
    hidden: torch.Tensor,
    head: torch.Tensor,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of the cross-entropies of all logits at once."""
    losses = functional.cross_entropy(hidden[tokens] @ head.T, targets, reduction="none")
    return (losses * weights.to(losses.dtype)).sum()
