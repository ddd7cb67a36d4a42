"""RoPE, KV write and paged attention for a CPU; what all layers share is computed once per step.

Index arithmetic, masks and table look-ups are the same in every layer. On a CPU these small calls
cost as much as the attention itself, so `CpuAttention.plan` does them once. For a layer remain a
rotation, one scatter, and one gather and one product per group of sequences. Layers with a sliding
window share a plan of their own, which gathers only the window's pages.

The result equals `rope_kv_write` followed by `paged_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.attention import attend, visible
from kernels.kv_pages import PageLayout
from kernels.rope import Pairs

# Largest number of tokens in a chunk whose query heads of one key head are computed as one matrix,
# as in a decode. For a long chunk, repeated keys cost less than this saves.
_FEW_TOKENS = 17


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one new token and contexts of similar length.

    rows     [S] int64 their rows of the step; None: all rows, in order
    blocks   [2, S, K, n] int64 the (page, key or value, head) blocks to read, those of layer 0
    padding  [M] int64 token rows of the gathered [2, S, K, n * B] that belong to no sequence
    mask     [S, 1, 1, n * B] bool, True where a token is attended to
    """

    rows: torch.Tensor | None
    blocks: torch.Tensor
    padding: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several new tokens, rows start to end of the step.

    num_keys  tokens from the first page that is read to the end of the chunk
    mask      [end - start, num_keys] bool, once for each query head of a key head if `is_short`;
              None: a causal mask, the chunk is the whole context
    is_short  whether it has few tokens, and others before them
    """

    start: int
    end: int
    num_keys: int
    blocks: torch.Tensor  # [2, 1, K, n] int64, as in _Decodes
    mask: torch.Tensor | None
    is_short: bool = False


class Rope(Protocol):
    """The tables of a rotation."""

    cos: torch.Tensor
    sin: torch.Tensor
    pairs: Pairs | None


_Work = tuple[list[_Decodes], list[_Chunk]]


class CpuAttention:
    """Plans steps over one arena.

    ropes    each layer's cosines and sines [M, D] fp32, the second half of a row repeats the first;
             None: nothing is rotated
    arena    [P, page_elems] fp32
    windows  each layer's sliding window or None; empty: no layer has one
    scale    of the scores; None: 1 / sqrt(D)
    growth   q's factors [T] of positions [T]; None: there are none
    """

    def __init__(
        self,
        *,
        ropes: Sequence[Rope | None],
        arena: torch.Tensor,
        layout: PageLayout,
        num_heads: int,
        windows: tuple[int | None, ...] = (),
        scale: float | None = None,
        growth: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.windows = windows or (None,) * layout.num_layers
        self.ropes, self._growth = ropes, growth
        self.scale = layout.head_dim**-0.5 if scale is None else scale
        self.orders = {
            id(rope): rope.pairs.order(layout.head_dim)
            for rope in ropes
            if rope is not None and rope.pairs is not None
        }
        self.arena, self.layout, self.num_heads = arena, layout, num_heads

    def plan(
        self,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        page_tables: torch.Tensor,
    ) -> CpuAttentionStep:
        """Plan a step's attention; arguments as of `rope_kv_write` and `paged_attention`."""
        work = {
            window: self._work(window, query_start, context_lens, page_tables)
            for window in set(self.windows)
        }
        angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for rope in self.ropes:
            if rope is not None and id(rope) not in angles:
                sin = rope.sin[positions].unsqueeze(1)
                # The rotation swaps the halves and negates the first; sin takes the sign.
                sin[..., : self.layout.head_dim // 2].neg_()
                angles[id(rope)] = rope.cos[positions].unsqueeze(1), sin
        growth = None if self._growth is None else self._growth(positions)[:, None, None]
        return CpuAttentionStep(
            self,
            angles=angles,
            growth=growth,
            kv_rows=self._kv_rows(slots),
            work=work,
        )

    def _work(
        self,
        window: int | None,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        page_tables: torch.Tensor,
    ) -> _Work:
        """Plan the work of the layers with one window."""
        starts, contexts = query_start.tolist(), context_lens.tolist()
        chunks, by_size = [], {}  # type: ignore[var-annotated]
        for s, context in enumerate(contexts):
            num_new = starts[s + 1] - starts[s]
            if num_new > 1:
                chunks.append(
                    self._chunk(starts[s], starts[s + 1], context, page_tables[s], window)
                )
            elif num_new == 1:
                seen = self._pages(context) - self._first_page(context - 1, window)
                # Contexts of one group differ by a factor of two at most, which bounds padding.
                by_size.setdefault(seen.bit_length(), []).append(s)
        decodes = [
            self._decodes(
                group, len(group) == starts[-1], query_start, context_lens, page_tables, window
            )
            for group in by_size.values()
        ]
        return decodes, chunks

    def _pages(self, context: int) -> int:
        return -(-context // self.layout.page_size)

    def _first_page(self, position: int, window: int | None) -> int:
        """Return the first page that a token attends to."""
        return 0 if window is None else max(position + 1 - window, 0) // self.layout.page_size

    def _kv_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return [T * 2 K] int64: the row of each new key and value in the arena as [.., D]."""
        layout = self.layout
        page = slots // layout.page_size * (layout.page_elems // layout.head_dim)
        heads = torch.arange(2 * layout.num_kv_heads) * layout.page_size
        return ((page + slots % layout.page_size)[:, None] + heads).flatten()

    def _blocks(self, tables: torch.Tensor) -> torch.Tensor:
        """Return for tables [S, n] the blocks [2, S, K, n]: rows of the arena as [.., B * D]."""
        layout = self.layout
        first = tables.long() * (layout.page_elems // layout.head_stride)
        heads = torch.arange(2 * layout.num_kv_heads).view(2, 1, -1, 1)
        return first[None, :, None, :] + heads

    def _decodes(
        self,
        group: list[int],
        is_all: bool,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        page_tables: torch.Tensor,
        window: int | None,
    ) -> _Decodes:
        chosen = torch.tensor(group)
        lengths, tables = context_lens[chosen], page_tables[chosen]
        if window is not None:
            # The tables begin at the window's first page, and so do the lengths.
            first_page = (lengths - window).clamp_min(0) // self.layout.page_size
            columns = torch.arange(tables.shape[1]) + first_page[:, None]
            tables = tables.gather(1, columns.clamp_max(tables.shape[1] - 1))
            lengths = lengths - first_page * self.layout.page_size
        num_pages = self._pages(int(lengths.max()))
        num_slots = num_pages * self.layout.page_size
        slots = torch.arange(num_slots)
        mask = slots < lengths[:, None]  # [S, N]
        if window is not None:
            mask &= slots >= lengths[:, None] - window
        shape = (2, len(group), self.layout.num_kv_heads, num_slots)
        padding = (~mask)[None, :, None, :].expand(shape).flatten().nonzero().flatten()
        return _Decodes(
            rows=None if is_all else query_start[chosen].long(),
            blocks=self._blocks(tables[:, :num_pages]),
            padding=padding,
            mask=mask[:, None, None, :],
        )

    def _chunk(
        self, start: int, end: int, context: int, page_table: torch.Tensor, window: int | None
    ) -> _Chunk:
        first = context - (end - start)
        first_page = self._first_page(first, window)
        first_key = first_page * self.layout.page_size
        mask = None
        if first > 0 or (window is not None and window < context):
            mask = visible(first, context, first_key, window)
        blocks = self._blocks(page_table[None, first_page : self._pages(context)])
        is_short = mask is not None and end - start <= _FEW_TOKENS
        if mask is not None and is_short:
            mask = mask.repeat(self.num_heads // self.layout.num_kv_heads, 1)
        return _Chunk(start, end, context - first_key, blocks, mask, is_short)


class CpuAttentionStep:
    """The attention of every layer of one step."""

    def __init__(
        self,
        owner: CpuAttention,
        *,
        angles: dict[int, tuple[torch.Tensor, torch.Tensor]],
        growth: torch.Tensor | None,
        kv_rows: torch.Tensor,
        work: dict[int | None, _Work],
    ) -> None:
        layout = owner.layout
        self._layout, self._num_heads = layout, owner.num_heads
        self._owner, self._angles, self._growth, self._kv_rows = owner, angles, growth, kv_rows
        self._work, self._windows = work, owner.windows
        self._token_rows = owner.arena.view(-1, layout.head_dim)
        self._block_rows = owner.arena.view(-1, layout.head_stride)
        self._scale = owner.scale

    def attend(
        self, heads: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rotate, write KV, attend.

        heads  [T, H + 2 K, D] queries, keys and values as projected
        sinks  [H], see `kernels.attention`
        -> [T, H * D]
        """
        layout, num_heads = self._layout, self._num_heads
        rotated = self._rotate(heads[:, : num_heads + layout.num_kv_heads], layer)
        values = heads[:, num_heads + layout.num_kv_heads :]
        if heads.shape[1] > num_heads:  # else the keys and values are an earlier layer's
            kv = torch.cat((rotated[:, num_heads:], values), dim=1).view(-1, layout.head_dim)
            rows = self._kv_rows + layer * (layout.layer_stride // layout.head_dim)
            self._token_rows.index_copy_(0, rows, kv)
        q = rotated[:, :num_heads]
        if self._growth is not None:
            q = q * self._growth
        decodes, chunks = self._work[self._windows[layer]]
        if len(decodes) == 1 and decodes[0].rows is None:
            return self._attend_decodes(q, decodes[0], layer, sinks)
        out = heads.new_empty(heads.shape[0], num_heads * layout.head_dim)
        for group in decodes:
            assert group.rows is not None
            out[group.rows] = self._attend_decodes(q[group.rows], group, layer, sinks)
        for chunk in chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(
                q[chunk.start : chunk.end], chunk, layer, sinks
            )
        return out

    def _rotate(self, heads: torch.Tensor, layer: int) -> torch.Tensor:
        """Rotate q and k [T, H + K, D]; each pair's dimensions then lie D / 2 apart."""
        rope = self._owner.ropes[layer]
        if rope is None:
            return heads
        cos, sin = self._angles[id(rope)]
        order = self._owner.orders.get(id(rope))
        if order is not None:  # scores are sums over a head, whatever its order
            heads = heads[..., order]
        half = self._layout.head_dim // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
        return torch.addcmul(heads * cos, swapped, sin)

    def _gather(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """Gather blocks [2, S, K, n]: return keys and values [2, S, K, n * B, D]."""
        index = blocks.flatten() + layer * 2 * self._layout.num_kv_heads
        gathered = self._block_rows.index_select(0, index)
        return gathered.view(*blocks.shape[:3], -1, self._layout.head_dim)

    def _attend_decodes(
        self, q: torch.Tensor, group: _Decodes, layer: int, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """q [S, H, D] -> [S, H * D]."""
        kv = self._gather(group.blocks, layer)
        # Values past a sequence's end are not its own and may not be finite: 0 * NaN is NaN.
        kv.view(-1, self._layout.head_dim).index_fill_(0, group.padding, 0.0)
        grouped = q.reshape(len(q), self._layout.num_kv_heads, -1, self._layout.head_dim)
        sinks = None if sinks is None else sinks.view(self._layout.num_kv_heads, -1, 1)
        out = attend(grouped, kv[0], kv[1], group.mask, self._scale, sinks)
        return out.reshape(len(q), -1)

    def _attend_chunk(
        self, q: torch.Tensor, chunk: _Chunk, layer: int, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """q [n, H, D] -> [n, H * D]."""
        kv = self._gather(chunk.blocks, layer)[:, :, :, : chunk.num_keys]
        if chunk.is_short:
            num_kv_heads, head_dim = self._layout.num_kv_heads, self._layout.head_dim
            grouped = q.view(len(q), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
            if sinks is not None:
                sinks = sinks.view(num_kv_heads, -1, 1).repeat_interleave(len(q), dim=1)
            grouped = grouped.reshape(1, num_kv_heads, -1, head_dim)
            out = attend(grouped, kv[0], kv[1], chunk.mask, self._scale, sinks)
            out = out.view(num_kv_heads, -1, len(q), head_dim).permute(2, 0, 1, 3)
            return out.reshape(len(q), -1)
        k, v = kv.repeat_interleave(self._num_heads // self._layout.num_kv_heads, dim=2)
        sinks = None if sinks is None else sinks[:, None, None]
        out = attend(q.transpose(0, 1).unsqueeze(0), k, v, chunk.mask, self._scale, sinks)
        return out.squeeze(0).transpose(0, 1).reshape(len(q), -1)
