"""Adapters of the token embedding and of the last matrix, whose one side is the vocabulary.

Rare and few: a step's segments that have them are walked one by one, in plain torch on any device.
The side as wide as the vocabulary lies by token, `[V, R]`, so that an embedding gathers R
neighbours for a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.lora_table import Blocks, ExtraSegment, LoraExtras, VocabPart


def lora_embed(
    hidden: torch.Tensor, token_ids: torch.Tensor, arena: torch.Tensor, extras: LoraExtras
) -> None:
    """Add what each row's adapter makes of its token to hidden [T, E], in place."""
    for segment in extras.segments:
        if segment.embedding:
            own = hidden[segment.start : segment.end]
            _adjust(own, arena, segment.embedding)
            for part in segment.embedding:
                h = _gather(arena, part.a, token_ids[segment.start : segment.end])
                h = h * (part.scale * part.weight)
                for low, high, block in _views(arena, part.b):
                    own += h[:, low:high] @ block


def lora_head(
    logits: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    extras: LoraExtras,
) -> None:
    """Add what each row's adapter makes of x [N, E] to logits [N, V], in place.

    The rows are those that sample, in their order.
    """
    for segment in extras.segments:
        if segment.head and segment.first < segment.last:
            own = logits[segment.first : segment.last]
            _adjust(own, arena, segment.head)
            for part in segment.head:
                rows = x[segment.first : segment.last]
                a = torch.cat([block for _, _, block in _views(arena, part.a)])
                h = (rows @ a.T) * (part.scale * part.weight)
                for low, high, block in _views(arena, part.b):
                    own[:, low:high] += h @ block.T


def sampled(extras: LoraExtras, sample_rows: torch.Tensor) -> LoraExtras:
    """The same for the rows that sample alone."""
    segments = tuple(
        ExtraSegment(
            start=segment.first,
            end=segment.last,
            first=segment.first,
            last=segment.last,
            adapter=segment.adapter,
            embedding=(),
            head=segment.head,
        )
        for segment in extras.segments
    )
    return LoraExtras(
        segments=segments,
        row_adapter=extras.row_adapter[sample_rows],
        adjust=extras.adjust,
    )


def _adjust(y: torch.Tensor, arena: torch.Tensor, parts: tuple[VocabPart, ...]) -> None:
    """Add the parts' weight * (gain * y + shift) to y [rows, out], in place."""
    gain = _weighted_sum(arena, [(part.gain, part.weight) for part in parts])
    shift = _weighted_sum(arena, [(part.shift, part.weight) for part in parts])
    if gain is not None:
        y.copy_(torch.addcmul(y.float(), y.float(), gain))
    if shift is not None:
        y += shift.to(y.dtype)


def _weighted_sum(
    arena: torch.Tensor, vectors: list[tuple[Blocks | None, float]]
) -> torch.Tensor | None:
    total: torch.Tensor | None = None
    for blocks, weight in vectors:
        if blocks is not None:
            vector = torch.cat([block for _, _, block in _views(arena, blocks)])
            vector = vector.view(-1).float() * weight
            total = vector if total is None else total + vector
    return total


def _gather(arena: torch.Tensor, blocks: Blocks, rows: torch.Tensor) -> torch.Tensor:
    """Rows of the matrix, [len(rows), width]."""
    offsets = torch.from_numpy(blocks.offsets).to(arena.device)
    first = offsets[rows // blocks.block_rows] + rows % blocks.block_rows * blocks.width
    columns = torch.arange(blocks.width, device=arena.device)
    return arena.view(-1)[first[:, None] + columns]


def _views(arena: torch.Tensor, blocks: Blocks) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first row, end row, their values where they lie [rows, width]) of every block."""
    flat = arena.view(-1)
    for i, offset in enumerate(blocks.offsets.tolist()):
        low = i * blocks.block_rows
        high = min(low + blocks.block_rows, blocks.rows)
        size = (high - low) * blocks.width
        yield low, high, flat[offset : offset + size].view(high - low, blocks.width)
