"""Attention over the paged KV cache: ragged, causal, grouped-query.

A step has S sequences. Sequence s has `query_start[s + 1] - query_start[s]` new tokens, the last of
its `context_lens[s]` tokens; 1 new token is a decode, more are a prefill chunk. The new tokens'
keys and values are already in the pages (`rope_kv_write`).

`window` is a sliding window: a token attends to the last `window` tokens, itself included; None:
to all. `sinks` [H] are the scores of one more key of each head, which has no value; None: there is
none. A GPU has no kernel for them.

Sources: PagedAttention, arXiv:2309.06180; grouped-query attention, arXiv:2305.13245.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.attention_decode import attention_decode_triton
from kernels.attention_prefill import attention_prefill_triton
from kernels.backend import use_triton
from kernels.kv_pages import PageLayout


def visible(first: int, context: int, first_key: int, window: int | None) -> torch.Tensor:
    """Return [context - first, context - first_key] bool: the keys that tokens from `first` see."""
    rows = torch.arange(first, context)[:, None]
    keys = torch.arange(first_key, context)
    return keys <= rows if window is None else (keys <= rows) & (keys > rows - window)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
    *,
    is_grouped: bool = False,
) -> torch.Tensor:
    """q [B, H, n, D], k and v [B, K, N, D] -> [B, H, n, D]; differentiable in all three.

    mask        bool, to [B, H, n, N]: where a token is attended to; None: causal, n is N
    sinks       to [B, H, n, 1]
    is_grouped  whether several heads of q share one of k
    """
    if sinks is not None:
        if mask is None:
            mask = visible(0, k.shape[2], 0, None).to(q.device)
        # One more dimension, in which only the further key is not 0, holds the sink's score.
        q = torch.cat((q, (sinks / scale).to(q.dtype).expand(*q.shape[:-1], 1)), dim=-1)
        k, v = (functional.pad(each, (0, 1, 0, 1)) for each in (k, v))
        k[..., -1, -1] = 1
        mask = functional.pad(mask, (0, 1), value=True)
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )
    return out if sinks is None else out[..., :-1]


def paged_attention_ref(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute every new token's attention over its sequence up to and including itself.

    q             [T, H, D]
    arena         [P, page_elems]
    query_start   [S + 1] int32  rows of q that belong to sequence s
    context_lens  [S] int32      tokens of the sequence, this step's included
    page_tables   [S, max_pages] int32; entries past a sequence's pages are not read
    -> [T, H, D]
    """
    pages = layout.kv(arena).view(
        -1, layout.num_layers, 2, layout.num_kv_heads, layout.page_size, layout.head_dim
    )[:, layer]
    key_scale, value_scale = layout.scales_of(layer)
    out = torch.zeros_like(q)
    starts = query_start.tolist()
    for s, context in enumerate(context_lens.tolist()):
        start, end = starts[s], starts[s + 1]
        if start == end:
            continue
        num_pages = -(-context // layout.page_size)
        own = pages.index_select(0, page_tables[s, :num_pages].long()).float()  # [n, 2, K, B, D]
        kv = own.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]  # [2, K, N, D]
        groups = q.shape[1] // layout.num_kv_heads
        k, v = kv.repeat_interleave(groups, dim=1)  # [H, N, D]
        scores = torch.einsum("thd,hnd->htn", q[start:end].float(), k) * (scale * key_scale)
        seen = visible(context - (end - start), context, 0, window).to(q.device)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            further = sinks.float()[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat((scores, further), dim=-1)
        weights = scores.softmax(-1)[..., :context]
        out[start:end] = (torch.einsum("htn,hnd->thd", weights, v) * value_scale).to(q.dtype)
    return out


def paged_attention(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
    *,
    sinks: torch.Tensor | None = None,
    max_new: int | None = None,
) -> torch.Tensor:
    """Compute every new token's attention over its sequence up to and including itself.

    Shapes as in `paged_attention_ref`. max_new is at least the longest chunk; on a GPU it avoids
    waiting for the device to find that.
    """
    if use_triton(q):
        assert sinks is None
        if max_new is None:
            max_new = int((query_start[1:] - query_start[:-1]).max())
        args = (q, arena, layout, layer, query_start, context_lens, page_tables, scale)
        out = attention_decode_triton(*args, window=window)
        if max_new > 1:
            attention_prefill_triton(*args, max_new=max_new, min_new=2, window=window, out=out)
        return out
    return paged_attention_torch(
        q, arena, layout, layer, query_start, context_lens, page_tables, scale, window, sinks
    )


def paged_attention_torch(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend on a CPU: all decodes in one batched call, each prefill chunk in its own."""
    out = torch.empty_like(q)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    decodes = []
    for s, context in enumerate(contexts):
        start, end = starts[s], starts[s + 1]
        if end - start == 1:
            decodes.append(s)
        elif end > start:
            out[start:end] = _attend_chunk(
                q[start:end], arena, layout, layer, page_tables[s], context, scale, window, sinks
            )
    if decodes:
        if len(decodes) == len(contexts):  # a pure decode step: rows are already in order
            return _attend_decodes(
                q, arena, layout, layer, context_lens, page_tables, scale, window, sinks
            )
        chosen = torch.tensor(decodes)
        rows = query_start[chosen].long()
        out[rows] = _attend_decodes(
            q[rows], arena, layout, layer, context_lens[chosen], page_tables[chosen], scale, window,
            sinks,
        )  # fmt: skip
    return out


def _gather_rows(
    arena: torch.Tensor, layout: PageLayout, layer: int, page_tables: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the pages of page_tables [S, n]: return keys and values, each [S, K, n * B, D]."""
    kv_heads = layout.num_kv_heads
    # One (page, layer, key or value, head) a row.
    blocks = layout.kv(arena).view(-1, layout.head_stride)
    first = page_tables.long() * (layout.num_layers * 2 * kv_heads) + layer * 2 * kv_heads
    index = first[:, None, :] + torch.arange(kv_heads)[None, :, None]  # [S, K, n]
    shape = (page_tables.shape[0], kv_heads, -1, layout.head_dim)
    keys = blocks.index_select(0, index.flatten()).view(shape)
    values = blocks.index_select(0, (index + kv_heads).flatten()).view(shape)
    if layout.is_fp8:
        key_scale, value_scale = layout.scales_of(layer)
        return keys.to(arena.dtype) * key_scale, values.to(arena.dtype) * value_scale
    return keys, values


def _attend_decodes(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    context_lens: torch.Tensor,
    page_tables: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for q [S, H, D], one new token per sequence -> [S, H, D]."""
    num_pages = -(-int(context_lens.max()) // layout.page_size)
    tables = page_tables[:, :num_pages].clamp_min(0)  # a padding entry may be -1
    keys, values = _gather_rows(arena, layout, layer, tables)
    keys_at = torch.arange(num_pages * layout.page_size)
    valid = keys_at < context_lens[:, None]  # [S, N]
    if window is not None:
        valid &= keys_at >= context_lens[:, None] - window
    row, column = (~valid).nonzero(as_tuple=True)
    # Values past a sequence's end are not its own and may not be finite: 0 * NaN is NaN.
    keys[row, :, column] = 0
    values[row, :, column] = 0
    grouped = q.view(q.shape[0], layout.num_kv_heads, -1, layout.head_dim)
    sinks = None if sinks is None else sinks.view(layout.num_kv_heads, -1, 1)
    out = attend(grouped, keys, values, valid[:, None, None, :], scale, sinks)
    return out.reshape(q.shape)


def _attend_chunk(
    q: torch.Tensor,
    arena: torch.Tensor,
    layout: PageLayout,
    layer: int,
    page_table: torch.Tensor,
    context: int,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend for q [n, H, D], the last n tokens of one sequence -> [n, H, D]."""
    num_new, num_heads, _ = q.shape
    first_page, num_pages = 0, -(-context // layout.page_size)
    if window is not None:
        first_page = max(context - num_new + 1 - window, 0) // layout.page_size
    num_keys = context - first_page * layout.page_size
    keys, values = _gather_rows(arena, layout, layer, page_table[None, first_page:num_pages])
    keys, values = keys[:, :, :num_keys], values[:, :, :num_keys]  # [1, K, N, D]
    groups = num_heads // layout.num_kv_heads
    heads = q.transpose(0, 1).unsqueeze(0)  # [1, H, n, D]
    is_whole = num_new == context and (window is None or window >= context)
    mask = None if is_whole else visible(context - num_new, context, context - num_keys, window)
    k, v = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
    out = attend(heads, k, v, mask, scale, None if sinks is None else sinks[:, None, None])
    return out.squeeze(0).transpose(0, 1)
