"""Chooses greedy tokens and prepares the next step's inputs on the device, without the host."""

from __future__ import annotations

import torch

from kernels.backend import ceil_div, jit, next_power_of_2, tl, use_triton

# Stands for a token if the row's largest logit is infinite or NaN.
OVERFLOWED = -(1 << 31)


def greedy_ref(logits: torch.Tensor) -> torch.Tensor:
    """logits [S, V] -> [S] int64, the first index of each row's largest value."""
    return logits.argmax(-1)


def mark_ref(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return token_ids [S], the greedy tokens of logits [S, V], with OVERFLOWED where they did."""
    largest = logits.gather(1, token_ids[:, None]).squeeze(1)
    return torch.where(largest < float("inf"), token_ids, OVERFLOWED)


@jit()
def _greedy_parts_kernel(
    logits_ptr, stride, values_ptr, indices_ptr, width, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    part_width = tl.cdiv(tl.cdiv(width, PARTS), BLOCK) * BLOCK
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    where = tl.zeros((BLOCK,), dtype=tl.int32)
    low = part * part_width
    for start in range(low, tl.minimum(low + part_width, width), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(logits_ptr + row * stride + columns, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x == x, x, float("inf"))  # NaN counts as the largest
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, columns, where)
    top = tl.max(best, axis=0)
    index = tl.min(tl.where(best == top, where, 2147483647), axis=0)
    tl.store(values_ptr + row * PARTS + part, top)
    tl.store(indices_ptr + row * PARTS + part, index)


@jit()
def _greedy_kernel(
    values_ptr, indices_ptr, out_ptr, marked_ptr, OVERFLOWED: tl.constexpr, PARTS: tl.constexpr
):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    values = tl.load(values_ptr + row * PARTS + part)
    indices = tl.load(indices_ptr + row * PARTS + part)
    top = tl.max(values, axis=0)
    best = tl.min(tl.where(values == top, indices, 2147483647), axis=0).to(tl.int64)
    tl.store(out_ptr + row, best)
    tl.store(marked_ptr + row, tl.where(top < float("inf"), best, OVERFLOWED))


def greedy_triton(
    logits: torch.Tensor, out: torch.Tensor | None = None, marked: torch.Tensor | None = None
) -> torch.Tensor:
    """Launch two kernels: over parts of each row, then over the parts; writes to `out` if given.

    marked  [S] int64, written: as in `mark_ref`
    """
    num_rows, width = logits.shape
    parts = min(
        next_power_of_2(ceil_div(width, 1024)), max(1, next_power_of_2(528 // max(num_rows, 1)))
    )
    values = torch.empty(num_rows, parts, dtype=torch.float32, device=logits.device)
    indices = torch.empty(num_rows, parts, dtype=torch.int32, device=logits.device)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if marked is None:
        marked = torch.empty_like(out)
    _greedy_parts_kernel[(num_rows, parts)](
        logits_ptr=logits,
        stride=logits.stride(0),
        values_ptr=values,
        indices_ptr=indices,
        width=width,
        PARTS=parts,
        BLOCK=1024,
        num_warps=4,
    )
    _greedy_kernel[(num_rows,)](
        values_ptr=values,
        indices_ptr=indices,
        out_ptr=out,
        marked_ptr=marked,
        OVERFLOWED=OVERFLOWED,
        PARTS=parts,
        num_warps=1,
    )
    return out


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """logits [S, V] -> [S] int64, the first index of each row's largest value."""
    return greedy_triton(logits) if use_triton(logits) else greedy_ref(logits)


def advance_ref(
    context_lens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
) -> None:
    """Advance each decoding sequence by one token, in place; context -1 is padding and stays.

    context_lens  [S] int32, tokens whose KV is in the pages; after it, the new one included
    positions     [S] int64, written: the new token's; 0 for padding
    slots         [S] int64, written: where the new token's KV goes; -1 for padding
    page_tables   [S, max_pages] int32, with the page of the new token in it
    """
    live = context_lens >= 0
    positions.copy_(torch.where(live, context_lens, 0))
    page = page_tables.gather(1, (positions // page_size)[:, None]).squeeze(1).long()
    slots.copy_(torch.where(live, page * page_size + positions % page_size, -1))
    context_lens += live.to(torch.int32)


@jit("num_rows", "table_stride")
def _advance_kernel(
    context_lens_ptr,
    positions_ptr,
    slots_ptr,
    page_tables_ptr,
    table_stride,
    num_rows,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = s < num_rows
    context = tl.load(context_lens_ptr + s, mask=inside, other=-1)
    live = context >= 0
    position = tl.where(live, context, 0)
    page = tl.load(
        page_tables_ptr + s.to(tl.int64) * table_stride + position // PAGE, mask=live, other=0
    )
    slot = page.to(tl.int64) * PAGE + position % PAGE
    tl.store(positions_ptr + s, position.to(tl.int64), mask=inside)
    tl.store(slots_ptr + s, tl.where(live, slot, -1), mask=inside)
    tl.store(context_lens_ptr + s, context + 1, mask=live)


def advance_triton(
    context_lens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
) -> None:
    """Do `advance_ref` in one launch."""
    num_rows = positions.shape[0]
    _advance_kernel[(ceil_div(num_rows, 128),)](
        context_lens_ptr=context_lens,
        positions_ptr=positions,
        slots_ptr=slots,
        page_tables_ptr=page_tables,
        table_stride=page_tables.stride(0),
        num_rows=num_rows,
        PAGE=page_size,
        BLOCK=128,
        num_warps=4,
    )


def advance(
    context_lens: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
) -> None:
    """Advance each decoding sequence by one token, in place; shapes as in `advance_ref`."""
    run = advance_triton if use_triton(positions) else advance_ref
    run(context_lens, positions, slots, page_tables, page_size)


def fill_unread_ref(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Replace each placeholder ~i by token i of `chosen`.

    token_ids  [T] int64, changed in place
    chosen     [N] int64
    """
    unread = token_ids < 0
    token_ids.copy_(torch.where(unread, chosen[torch.where(unread, ~token_ids, 0)], token_ids))


@jit("num_tokens")
def _fill_unread_kernel(token_ids_ptr, chosen_ptr, num_tokens, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids_ptr + t, mask=t < num_tokens, other=0)
    unread = token < 0
    chosen = tl.load(chosen_ptr + (-1 - token), mask=unread, other=0)
    tl.store(token_ids_ptr + t, chosen, mask=unread)


def fill_unread_triton(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Do `fill_unread_ref` in one launch."""
    num_tokens = token_ids.shape[0]
    _fill_unread_kernel[(ceil_div(num_tokens, 256),)](
        token_ids_ptr=token_ids,
        chosen_ptr=chosen,
        num_tokens=num_tokens,
        BLOCK=256,
        num_warps=4,
    )
