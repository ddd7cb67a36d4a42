"""Replaces rows of the embedding and of the LM head for the few tokens that an adapter trains.

An adapter that adds tokens trains their rows and nothing else of the vocabulary. The base's
products are computed for all tokens; the results of the adapter's tokens are then replaced. The
parts of a blend replace them in proportion to their weights: y becomes y + Σ weight * (new - y).
"""

from __future__ import annotations

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, num_launched, tl
from kernels.lora.table import RowTable

# Programs that share the new tokens of one row; each token reads a row of the LM head.
_HEAD_PROGRAMS = 16


def replace_embedded_ref(
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    arena: torch.Tensor,
    table: RowTable,
    row_adapter: torch.Tensor,
) -> None:
    """Replace the embeddings [T, E] of tokens for which the row's adapter has a new row, in place.

    token_ids    [T]
    row_adapter  [T] int32  index into the table; -1: the base
    """
    for row, token_id in enumerate(token_ids.tolist()):
        for token, keep, new in _replaced(hidden.shape[1], arena, table, int(row_adapter[row])):
            if token == token_id:
                hidden[row] = _mixed(hidden[row], keep, new)


def replace_logits_ref(
    logits: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: RowTable,
    row_adapter: torch.Tensor,
) -> None:
    """Replace the logits [N, V] of tokens for which the row's adapter has a new row, in place.

    x            [N, E] the input of the LM head
    row_adapter  [N] int32  index into the table; -1: the base
    """
    for row in range(len(x)):
        for token, keep, new in _replaced(x.shape[1], arena, table, int(row_adapter[row])):
            logits[row, token] = _mixed(logits[row, token], keep, new @ x[row].float())


def _replaced(
    width: int, arena: torch.Tensor, table: RowTable, adapter: int
) -> list[tuple[int, float, torch.Tensor]]:
    """Return (token, share of the base that stays, weighted sum of the new rows [E]) per token."""
    if adapter < 0:
        return []
    found = []
    first, flat = int(table.first[adapter]), arena.view(-1)
    for i in range(first, first + int(table.count[adapter])):
        keep, new = 1.0, torch.zeros(width, device=arena.device)
        start = int(table.part_start[i])
        for part in range(start, start + int(table.num_parts[i])):
            offset, weight = int(table.offset[part]), float(table.weight[part])
            new += weight * flat[offset : offset + width].float()
            keep -= weight
        found.append((int(table.token_id[i]), keep, new))
    return found


def _mixed(base: torch.Tensor, keep: float, new: torch.Tensor) -> torch.Tensor:
    return new if keep == 0 else base.float() * keep + new


@jit()
def _embedded_kernel(
    hidden_ptr,
    token_ids_ptr,
    arena_ptr,
    row_adapter_ptr,
    first_ptr,
    count_ptr,
    token_id_ptr,
    part_start_ptr,
    num_parts_ptr,
    offset_ptr,
    weight_ptr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row = tl.program_id(0)
    adapter = tl.load(row_adapter_ptr + row)
    count = tl.load(count_ptr + adapter, mask=adapter >= 0, other=0)
    if count > 0:
        token = tl.load(token_ids_ptr + row)
        first = tl.load(first_ptr + adapter)
        found = 0  # the token's number among the adapter's, from 1; 0: it is not one of them
        for start in range(0, count, BLOCK_M):
            i = start + tl.arange(0, BLOCK_M)
            ids = tl.load(token_id_ptr + first + i, mask=i < count, other=-1)
            found += tl.sum(tl.where(ids == token, i + 1, 0), axis=0)
        if found > 0:
            entry = first + found - 1
            part = tl.load(part_start_ptr + entry)
            parts = tl.load(num_parts_ptr + entry)
            columns = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
            inside = columns < E
            new = tl.zeros((BLOCK_E,), dtype=tl.float32)
            keep = 1.0
            for p in range(part, part + parts):
                weight = tl.load(weight_ptr + p)
                offset = tl.load(offset_ptr + p)
                values = tl.load(arena_ptr + offset + columns, mask=inside, other=0.0)
                new += weight * values.to(tl.float32)
                keep -= weight
            place = hidden_ptr + row.to(tl.int64) * E + columns
            base = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            mixed = tl.where(keep == 0.0, new, base * keep + new)
            tl.store(place, mixed.to(hidden_ptr.dtype.element_ty), mask=inside)


@jit()
def _logits_kernel(
    logits_ptr,
    logits_stride,
    x_ptr,
    x_stride,
    arena_ptr,
    row_adapter_ptr,
    first_ptr,
    count_ptr,
    token_id_ptr,
    part_start_ptr,
    num_parts_ptr,
    offset_ptr,
    weight_ptr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    row = tl.program_id(0)
    adapter = tl.load(row_adapter_ptr + row)
    count = tl.load(count_ptr + adapter, mask=adapter >= 0, other=0)
    if count > tl.program_id(1) * BLOCK_M:
        first = tl.load(first_ptr + adapter)
        x_row = x_ptr + row.to(tl.int64) * x_stride
        step = tl.num_programs(1) * BLOCK_M
        for start in range(tl.program_id(1) * BLOCK_M, count, step):
            i = start + tl.arange(0, BLOCK_M)
            live = i < count
            part = tl.load(part_start_ptr + first + i, mask=live, other=0)
            parts = tl.load(num_parts_ptr + first + i, mask=live, other=0)
            new = tl.zeros((BLOCK_M,), dtype=tl.float32)
            keep = tl.full((BLOCK_M,), 1.0, dtype=tl.float32)
            for p in range(0, tl.max(parts, axis=0)):
                has = p < parts
                weight = tl.load(weight_ptr + part + p, mask=has, other=0.0)
                offset = tl.load(offset_ptr + part + p, mask=has, other=0)
                dots = tl.zeros((BLOCK_M,), dtype=tl.float32)
                for low in range(0, E, BLOCK_E):
                    columns = low + tl.arange(0, BLOCK_E)
                    inside = columns < E
                    x = tl.load(x_row + columns, mask=inside, other=0.0).to(tl.float32)
                    values = tl.load(
                        arena_ptr + offset[:, None] + columns[None, :],
                        mask=has[:, None] & inside[None, :],
                        other=0.0,
                    )
                    dots += tl.sum(values.to(tl.float32) * x[None, :], axis=1)
                new += weight * dots
                keep -= weight
            token = tl.load(token_id_ptr + first + i, mask=live, other=0)
            place = logits_ptr + row.to(tl.int64) * logits_stride + token
            base = tl.load(place, mask=live, other=0.0).to(tl.float32)
            mixed = tl.where(keep == 0.0, new, base * keep + new)
            tl.store(place, mixed.to(logits_ptr.dtype.element_ty), mask=live)


def replace_embedded_triton(
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    arena: torch.Tensor,
    table: RowTable,
    row_adapter: torch.Tensor,
) -> None:
    """Launch a program per row and part of its columns; rows without a new row end early.

    hidden is contiguous.
    """
    width = hidden.shape[1]
    block = min(1024, next_power_of_2(width))
    _embedded_kernel[(hidden.shape[0], ceil_div(width, block))](
        hidden_ptr=hidden,
        token_ids_ptr=token_ids,
        arena_ptr=arena,
        row_adapter_ptr=row_adapter,
        **_pointers(table),
        E=width,
        BLOCK_M=64,
        BLOCK_E=block,
        num_warps=4,
    )


def replace_logits_triton(
    logits: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    table: RowTable,
    row_adapter: torch.Tensor,
) -> None:
    """Launch programs that share a row's new tokens; those of rows without any end early."""
    width = x.shape[1]
    _logits_kernel[(x.shape[0], num_launched(_HEAD_PROGRAMS, x.device))](
        logits_ptr=logits,
        logits_stride=logits.stride(0),
        x_ptr=x,
        x_stride=x.stride(0),
        arena_ptr=arena,
        row_adapter_ptr=row_adapter,
        **_pointers(table),
        E=width,
        BLOCK_M=16,
        BLOCK_E=min(128, next_power_of_2(width)),
        num_warps=4,
    )


def _pointers(table: RowTable) -> dict[str, torch.Tensor]:
    return {
        "first_ptr": table.first,
        "count_ptr": table.count,
        "token_id_ptr": table.token_id,
        "part_start_ptr": table.part_start,
        "num_parts_ptr": table.num_parts,
        "offset_ptr": table.offset,
        "weight_ptr": table.weight,
    }
