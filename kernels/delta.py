"""The gated delta net: a mixer whose memory of the past is one matrix for each head.

Source: Yang et al., arXiv:2412.06464. With a decay exp(g), a rate beta and a key k of length one,
each token changes its head's state S [key width, value width] to

    exp(g) S + k u,    u = beta (v - exp(g) S^T k),    and reads S^T q

q, k and v come out of a convolution over the last few tokens. A chunk's u are found together: they
solve a triangular system (arXiv:2406.06484). All is plain torch, in fp32 at least, and
differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

# Tokens whose values are found together.
_CHUNK = 64
# Number added to the square of a key's length before its root divides the key.
EPS = 1e-6


class DeltaShape(NamedTuple):
    """The shape of a gated delta net.

    num_keys, num_values  heads of q and k, and of v; one of the former serves adjacent ones of the
                          latter
    key_dim, value_dim    widths of these heads
    kernel                tokens that the convolution reads, the newest one included
    """

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def key_size(self) -> int:
        return self.num_keys * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_values * self.value_dim

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Return the widths of what is projected: q, k and v; the gate; the rates; the decays."""
        mixed = 2 * self.key_size + self.value_size
        return mixed, self.value_size, self.num_values, self.num_values

    @property
    def window(self) -> tuple[int, int]:
        """Return the shape of the inputs that the convolution keeps."""
        return self.kernel - 1, self.widths[0]

    @property
    def matrix(self) -> tuple[int, int, int]:
        """Return the shape of the heads' states."""
        return self.num_values, self.key_dim, self.value_dim

    @property
    def state_size(self) -> int:
        """Return the numbers that a layer keeps of a sequence."""
        return math.prod(self.window) + math.prod(self.matrix)


class DeltaWeights(NamedTuple):
    """A layer's tensors beside its linears.

    convolution  [channels, kernel]
    rate         [num_values] log of the decay's factor
    shift        [num_values] of the decay's input
    norm         [value_dim] of what each head reads
    """

    convolution: torch.Tensor
    rate: torch.Tensor
    shift: torch.Tensor
    norm: torch.Tensor


class DeltaState(NamedTuple):
    """The memory of B sequences.

    window  [B, kernel - 1, channels] fp32: the convolution's last inputs
    matrix  [B, num_values, key_dim, value_dim] fp32
    """

    window: torch.Tensor
    matrix: torch.Tensor

    @classmethod
    def zero(cls, shape: DeltaShape, count: int, device: torch.device) -> DeltaState:
        """Return the memory of sequences that begin."""
        sizes = shape.window, shape.matrix
        return cls(*(torch.zeros(count, *size, device=device) for size in sizes))


def delta_net(
    packed: torch.Tensor, state: DeltaState, weights: DeltaWeights, shape: DeltaShape, eps: float
) -> tuple[torch.Tensor, DeltaState]:
    """Mix the next T tokens of B sequences.

    packed  [B, T, sum of widths] as projected
    eps     of the norm
    -> [B, T, value_size] and the memory behind them
    """
    wide = torch.promote_types(packed.dtype, torch.float32)
    kernel, rate, shift, norm = (each.to(wide) for each in weights)
    mixed, gate, rates, decays = torch.split(packed.to(wide), list(shape.widths), -1)
    before = torch.cat((state.window, mixed), 1)
    mixed = functional.conv1d(before.transpose(1, 2), kernel[:, None], groups=len(kernel))
    sizes = [shape.key_size, shape.key_size, shape.value_size]
    heads = torch.split(functional.silu(mixed.transpose(1, 2)), sizes, -1)
    q, k, v = (
        part.reshape(*part.shape[:2], -1, width)
        for part, width in zip(heads, (shape.key_dim, shape.key_dim, shape.value_dim), strict=True)
    )
    decay = functional.softplus(decays + shift) * -rate.exp()
    read, matrix = gated_delta(
        _unit(q) * shape.key_dim**-0.5, _unit(k), v, decay, rates.sigmoid(), state.matrix
    )
    read = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + eps) * norm
    out = read.flatten(2) * functional.silu(gate)
    window = before[:, packed.shape[1] :]
    return out.to(packed.dtype), DeltaState(window, matrix)


def gated_delta_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the rule above over T tokens of B sequences.

    q, k         [B, T, num_keys, key_dim]
    v            [B, T, num_values, value_dim]
    decay, rate  [B, T, num_values], g and beta
    state        [B, num_values, key_dim, value_dim]
    -> what is read [B, T, num_values, value_dim], and the state behind the last token
    """
    q, k = (each.repeat_interleave(v.shape[2] // k.shape[2], 2) for each in (q, k))
    reads = []
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        known = (state * k[:, t, :, :, None]).sum(-2)
        change = rate[:, t, :, None] * (v[:, t] - known)
        state = state + k[:, t, :, :, None] * change[:, :, None]
        reads.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(reads, 1), state


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gated_delta_ref`, but for the order of sums."""
    q, k = (each.repeat_interleave(v.shape[2] // k.shape[2], 2) for each in (q, k))
    state, parts = state.to(v.dtype), []
    pieces = (torch.split(each.transpose(1, 2), _CHUNK, 2) for each in (q, k, v, decay, rate))
    for chunk in zip(*pieces, strict=True):
        read, state = _chunk(state, *chunk)
        parts.append(read)
    return torch.cat(parts, 2).transpose(1, 2), state


def _chunk(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gated_delta`, with heads before tokens: q [B, H, T, key_dim], decay [B, H, T]."""
    total = decay.cumsum(-1)
    since = total[..., :, None] - total[..., None, :]  # from one token to another
    # What would grow is never read, but its gradient would be infinite.
    since = since.tril().exp().tril()
    known = rate[..., None] * since * (k @ k.transpose(-1, -2))
    reached = total.exp()[..., None]
    wanted = rate[..., None] * (v - reached * (k @ state))
    change = torch.linalg.solve_triangular(known.tril(-1), wanted, upper=False, unitriangular=True)
    read = reached * (q @ state) + (since * (q @ k.transpose(-1, -2))) @ change
    left = (total[..., -1:] - total).exp()[..., None]
    return read, total[..., -1, None, None].exp() * state + (left * k).transpose(-1, -2) @ change


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def groups_of(
    bounds: Sequence[int], device: torch.device
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Group packed sequences by length.

    bounds  sequence i is rows bounds[i] to bounds[i + 1]
    -> (which sequences, their rows [sequences, T] int64)
    """
    found: dict[int, list[int]] = {}
    for index, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            found.setdefault(end - start, []).append(index)
    for length, members in found.items():
        firsts = torch.tensor([bounds[index] for index in members], device=device)
        yield members, firsts[:, None] + torch.arange(length, device=device)
