"""LoRA of the token embedding and of the LM head, and rows of them that adapters replace.

Replaced rows are here only if kernels/lora/rows.py has no table of them. Such adapters are rare, so
their segments are computed one by one, in plain torch on any device. The matrix as wide as the
vocabulary is stored by token, `[V, R]`, so that an embedding reads R adjacent values for a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from kernels.lora.table import Blocks, ExtraSegment, LoraExtras, NewRows, VocabPart

# Number of rows of a replaced matrix to multiply at a time: their results need memory beside the
# logits.
_ROWS = 8192


def lora_embed(
    hidden: torch.Tensor, token_ids: torch.Tensor, arena: torch.Tensor, extras: LoraExtras
) -> None:
    """Add each row's adapter output for its token to hidden [T, E], in place."""
    for segment in extras.segments:
        if segment.embedding or segment.new_embedding:
            own, ids = hidden[segment.start : segment.end], token_ids[segment.start : segment.end]
            base = _base_of(own, segment.embedding, segment.new_embedding)
            _adjust(own, arena, segment.embedding)
            for new in segment.new_embedding:
                _replace_embedded(own, base, ids, arena, new)
            for part in segment.embedding:
                h = _gather(arena, part.a, ids)
                h = h * (part.scale * part.weight)
                for low, high, block in block_views(arena, part.b):
                    own += h[:, low:high] @ block


def _replace_embedded(
    own: torch.Tensor, base: torch.Tensor, ids: torch.Tensor, arena: torch.Tensor, new: NewRows
) -> None:
    """Add weight * (new - base) to the rows of `own` whose tokens are new."""
    if new.token_ids is None:
        rows, places = torch.arange(len(ids), device=ids.device), ids
    else:
        is_new = ids[:, None] == torch.from_numpy(new.token_ids).to(ids.device)
        rows, places = is_new.nonzero(as_tuple=True)
    values = _gather(arena, new.blocks, places).float()
    own[rows] = _replaced(own[rows], base[rows], values, new.weight)


def _replaced(
    y: torch.Tensor, base: torch.Tensor, new: torch.Tensor, weight: float
) -> torch.Tensor:
    """Return y + weight * (new - base): exactly `new` if y is the base and the weight is one."""
    return (y.float() - weight * base.float() + weight * new).to(y.dtype)


def _base_of(
    own: torch.Tensor, parts: tuple[VocabPart, ...], new: tuple[NewRows, ...]
) -> torch.Tensor:
    """Return the base's result: a copy of `own` if it will be changed twice, else itself."""
    changes_twice = bool(new) and len(parts) + len(new) > 1
    return own.to(torch.float32, copy=True) if changes_twice else own


def lora_head(
    logits: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    extras: LoraExtras,
) -> None:
    """Add each row's adapter output for x [N, E] to logits [N, V], in place.

    The rows are the sampling rows, in order.
    """
    for segment in extras.segments:
        if (segment.head or segment.new_head) and segment.first < segment.last:
            own = logits[segment.first : segment.last]
            rows = x[segment.first : segment.last]
            base = _base_of(own, segment.head, segment.new_head)
            _adjust(own, arena, segment.head)
            for new in segment.new_head:
                _replace_logits(own, base, rows, arena, new)
            for part in segment.head:
                a = torch.cat([block for _, _, block in block_views(arena, part.a)])
                h = (rows @ a.T) * (part.scale * part.weight)
                for low, high, block in block_views(arena, part.b):
                    own[:, low:high] += h @ block.T


def _replace_logits(
    own: torch.Tensor, base: torch.Tensor, x: torch.Tensor, arena: torch.Tensor, new: NewRows
) -> None:
    """Add weight * (new - base) to the columns of `own` whose tokens are new."""
    for first, _, run in block_views(arena, new.blocks):
        for low in range(first, first + len(run), _ROWS):
            block = run[low - first : low - first + _ROWS]
            columns: slice | torch.Tensor = slice(low, low + len(block))
            if new.token_ids is not None:
                columns = torch.from_numpy(new.token_ids[columns]).to(x.device)
            values = (x @ block.T).float()
            own[:, columns] = _replaced(own[:, columns], base[:, columns], values, new.weight)


def sampled(extras: LoraExtras, sample_rows: torch.Tensor) -> LoraExtras:
    """Return the extras for the sampling rows alone."""
    segments = tuple(
        ExtraSegment(
            start=segment.first,
            end=segment.last,
            first=segment.first,
            last=segment.last,
            adapter=segment.adapter,
            embedding=(),
            head=segment.head,
            new_head=segment.new_head,
        )
        for segment in extras.segments
    )
    return replace(extras, segments=segments, row_adapter=extras.row_adapter[sample_rows])


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
            vector = torch.cat([block for _, _, block in block_views(arena, blocks)])
            vector = vector.view(-1).float() * weight
            total = vector if total is None else total + vector
    return total


def _gather(arena: torch.Tensor, blocks: Blocks, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of the matrix, [len(rows), width]."""
    offsets = torch.from_numpy(blocks.offsets).to(arena.device)
    first = offsets[rows // blocks.block_rows] + rows % blocks.block_rows * blocks.width
    columns = torch.arange(blocks.width, device=arena.device)
    return arena.view(-1)[first[:, None] + columns]


def block_views(arena: torch.Tensor, blocks: Blocks) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield (first row, end row, view [rows, width] of the arena) for every run of blocks.

    Blocks that are adjacent in the arena are one run: a matrix in adjacent pages has few runs.
    """
    flat, size = arena.view(-1), blocks.block_rows * blocks.width
    starts = [0, *(np.nonzero(np.diff(blocks.offsets) != size)[0] + 1).tolist()]
    for first, end in itertools.pairwise([*starts, len(blocks.offsets)]):
        low, high = first * blocks.block_rows, min(end * blocks.block_rows, blocks.rows)
        offset = int(blocks.offsets[first])
        values = flat[offset : offset + (high - low) * blocks.width]
        yield low, high, values.view(high - low, blocks.width)
