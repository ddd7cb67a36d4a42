"""A decoder of random weights at Llama-3.1-8B's shape and the adapters of many runs on it.

The forward and backward pass of a training step through `kernels.training`, without the trainer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from kernels.training import (
    SPAN,
    Heads,
    LoraSite,
    LoraWeight,
    Norm,
    Placement,
    Pools,
    RunStep,
    adamw,
    answer_loss,
    attention_sublayer,
    make_rows,
    make_segments,
    make_sites,
    mlp_sublayer,
)

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocabulary: int = 128256
    layers: int = 32

    @property
    def bounds(self) -> tuple[tuple[int, ...], ...]:
        """The columns of each module in the outputs of qkv, o, gate_up and down."""
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        return (
            (0, q, q + kv, q + 2 * kv), (0, self.hidden), (0, self.inner, 2 * self.inner),
            (0, self.hidden),
        )  # fmt: skip

    @property
    def widths(self) -> tuple[int, ...]:
        """The inputs of the same four."""
        return (self.hidden, self.heads * self.dim, self.hidden, self.inner)

    @property
    def linear_elements(self) -> int:
        """Elements of a layer's four matrices."""
        return sum(b[-1] * w for b, w in zip(self.bounds, self.widths, strict=True))


TINY = Shape(hidden=64, inner=96, heads=4, kv_heads=2, dim=16, vocabulary=160, layers=2)


@dataclass(frozen=True)
class Work:
    """What one step trains: runs, the rows of each, tokens of a row."""

    runs: int
    rows: int
    length: int
    rank: int = 16
    answers: float = 0.4  # the share of tokens that the loss is of

    @property
    def tokens(self) -> int:
        return self.runs * self.rows * self.length


def randn(*shape: int, like: torch.Tensor, deviation: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device).normal_(0, deviation)


def make_pools(size: int, dtype: torch.dtype, device: str) -> Pools:
    values = torch.empty(size, dtype=dtype, device=device).normal_(0, 0.01)
    wide = [torch.zeros(size, dtype=torch.float32, device=device) for _ in range(4)]
    wide[0].copy_(values)
    return Pools(values, *wide)


def place(shape: Shape, work: Work, layers: int) -> tuple[list[list[Placement]], int]:
    """[layer * weight][module][run] placements, and the elements of a run's span."""
    size, offsets = 0, []
    for _ in range(layers):
        for bounds, width in zip(shape.bounds, shape.widths, strict=True):
            modules = []
            for low, high in itertools.pairwise(bounds):
                modules.append((size, size + work.rank * width))
                size += work.rank * (width + high - low)
            offsets.append(modules)
    span = -(-size // SPAN) * SPAN
    placed = [
        [
            [Placement(span * run + a, span * run + b, work.rank, 2.0) for run in range(work.runs)]
            for a, b in modules
        ]
        for modules in offsets
    ]
    return placed, span


class Stack:
    """Base, runs and a step's tokens.

    recomputed  layers whose activations are computed again in the backward pass
    """

    def __init__(
        self, shape: Shape, work: Work, *, recomputed: int = 0, device: str = "cuda"
    ) -> None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        like = torch.empty(0, dtype=dtype, device=device)
        self.shape, self.work, self.recomputed = shape, work, recomputed
        self.weights = [
            [
                randn(b[-1], w, like=like, deviation=w**-0.5)
                for b, w in zip(shape.bounds, shape.widths, strict=True)
            ]
            for _ in range(shape.layers)
        ]
        self.norm = torch.ones(shape.hidden, dtype=dtype, device=device)
        self.embedding = randn(shape.vocabulary, shape.hidden, like=like)
        self.head = randn(shape.vocabulary, shape.hidden, like=like, deviation=0.02)
        placed, self.span = place(shape, work, shape.layers)
        sites = make_sites(list(shape.bounds) * shape.layers, placed, device)
        self.sites = [sites[4 * i : 4 * i + 4] for i in range(shape.layers)]
        self.pools = make_pools(self.span * work.runs, dtype, device)
        self.rows = make_rows([work.length] * (work.runs * work.rows), device)
        self.segments = make_segments([work.rows * work.length] * work.runs, device)
        angles = torch.outer(
            torch.arange(work.length), 1e4 ** -(torch.arange(0, shape.dim, 2) / shape.dim)
        ).repeat(1, 2)
        self.heads = Heads(
            num_heads=shape.heads, num_kv_heads=shape.kv_heads, dim=shape.dim,
            cos=angles.cos().to(device), sin=angles.sin().to(device),
        )  # fmt: skip
        self.ids = torch.randint(shape.vocabulary, (work.tokens,), device=device)
        per_row = max(1, int(work.length * work.answers))
        last = torch.arange(work.length - per_row, work.length)
        starts = torch.arange(work.runs * work.rows)[:, None] * work.length
        self.answers = (starts + last).flatten().to(device)
        self.targets = self.ids[self.answers]
        self.loss_weights = torch.full(
            (len(self.answers),), 1 / (per_row * work.rows), device=device
        )
        self.steps = 0

    def layer(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        pools, segments = self.pools, self.segments
        parts = [
            LoraWeight(weight, None, site)
            for weight, site in zip(self.weights[index], self.sites[index], strict=True)
        ]
        norm, keep = Norm(self.norm, EPS), index >= self.recomputed
        hidden = attention_sublayer(
            hidden, norm, parts[0], parts[1], self.heads, pools, segments, self.rows, keep=keep
        )
        return mlp_sublayer(hidden, norm, parts[2], parts[3], pools, segments, keep=keep)

    def loss(self) -> torch.Tensor:
        hidden = self.embedding[self.ids].requires_grad_()
        for index in range(self.shape.layers):
            hidden = self.layer(hidden, index)
        norm = Norm(self.norm, EPS)
        return answer_loss(
            hidden, self.head, self.answers, self.targets, self.loss_weights, norm=norm
        )[0]

    def step(self) -> torch.Tensor:
        """Forward, backward and update; the loss."""
        loss = self.loss()
        loss.backward()
        self.steps += 1
        adamw(self.pools, [
            RunStep(first=run * self.span, size=self.span, step=self.steps, lr=1e-4, max_norm=1.0)
            for run in range(self.work.runs)
        ])  # fmt: skip
        return loss.detach()

    def step_tflop(self) -> float:
        """TFLOP of the base's products in a step that recomputes nothing.

        The head's are of answer tokens alone; a linear's backward has one product, its weight none.
        """
        layers = 4 * self.shape.linear_elements * self.shape.layers * self.work.tokens
        head = 4 * self.shape.hidden * self.shape.vocabulary * len(self.answers)
        return (layers + head) / 1e12


def site_of(shape: Shape, work: Work, index: int, device: str) -> tuple[LoraSite, Pools]:
    """One of the four weights' adapters alone, for timing an operation."""
    placed, span = place(shape, work, 1)
    sites = make_sites(list(shape.bounds), placed, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return sites[index], make_pools(span * work.runs, dtype, device)
