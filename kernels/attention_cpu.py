"""RoPE, KV write and paged attention for a CPU: what all layers share is worked out once a step.

Thirty layers repeat the same index arithmetic, masks and table look-ups. On a CPU these small
calls cost as much as the attention itself, so `CpuAttention.plan` does them once, and a layer is
left with a rotation, one scatter, and per group of sequences one gather and one product.

The result is `rope_kv_write` followed by `paged_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.kv_pages import PageLayout


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one new token and contexts of similar length.

    rows     [S] int64 their rows of the step; None: all rows, in order
    blocks   [2, S, K, n] int64 in layer 0 the (page, key or value, head) blocks of their pages
    padding  [M] int64 token rows of the gathered [2, S, K, n * B] that belong to nobody
    mask     [S, 1, 1, n * B] bool, True where there is a token
    """

    rows: torch.Tensor | None
    blocks: torch.Tensor
    padding: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several new tokens, rows start to end of the step.

    mask  [end - start, context] bool; None: the chunk is the whole context, plainly causal
    """

    start: int
    end: int
    context: int
    blocks: torch.Tensor  # [2, 1, K, n] int64, as of _Decodes
    mask: torch.Tensor | None


class CpuAttention:
    """Plans steps over one arena.

    cos, sin  [M, D] fp32, the first half repeated
    arena     [P, page_elems] fp32
    """

    def __init__(
        self,
        *,
        cos: torch.Tensor,
        sin: torch.Tensor,
        arena: torch.Tensor,
        layout: PageLayout,
        num_heads: int,
    ) -> None:
        half = layout.head_dim // 2
        self._cos = cos
        # The rotation swaps the halves and negates the first; the sign is kept here.
        self._sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=1)
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
        """The step's attention; arguments as of `rope_kv_write` and `paged_attention`."""
        starts, contexts = query_start.tolist(), context_lens.tolist()
        chunks, by_size = [], {}  # type: ignore[var-annotated]
        for s, context in enumerate(contexts):
            num_new, num_pages = starts[s + 1] - starts[s], self._pages(context)
            if num_new > 1:
                chunks.append(self._chunk(starts[s], starts[s + 1], context, page_tables[s]))
            elif num_new == 1:
                # Contexts of one group differ by a factor of two at most: padding is bounded.
                by_size.setdefault(num_pages.bit_length(), []).append(s)
        decodes = [
            self._decodes(
                group, len(group) == len(positions), query_start, context_lens, page_tables
            )
            for group in by_size.values()
        ]
        return CpuAttentionStep(
            self,
            cos=self._cos[positions].unsqueeze(1),
            sin=self._sin[positions].unsqueeze(1),
            kv_rows=self._kv_rows(slots),
            decodes=decodes,
            chunks=chunks,
        )

    def _pages(self, context: int) -> int:
        return -(-context // self.layout.page_size)

    def _kv_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """[T * 2 K] int64: each new key's and value's row of the arena seen as [.., D]."""
        layout = self.layout
        page = slots // layout.page_size * (layout.page_elems // layout.head_dim)
        heads = torch.arange(2 * layout.num_kv_heads) * layout.page_size
        return ((page + slots % layout.page_size)[:, None] + heads).flatten()

    def _blocks(self, tables: torch.Tensor) -> torch.Tensor:
        """tables [S, n] -> [2, S, K, n], in the arena seen as [.., B * D]."""
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
    ) -> _Decodes:
        chosen = torch.tensor(group)
        lengths = context_lens[chosen]
        num_pages = self._pages(int(lengths.max()))
        num_slots = num_pages * self.layout.page_size
        mask = torch.arange(num_slots) < lengths[:, None]  # [S, N]
        shape = (2, len(group), self.layout.num_kv_heads, num_slots)
        padding = (~mask)[None, :, None, :].expand(shape).flatten().nonzero().flatten()
        return _Decodes(
            rows=None if is_all else query_start[chosen].long(),
            blocks=self._blocks(page_tables[chosen, :num_pages]),
            padding=padding,
            mask=mask[:, None, None, :],
        )

    def _chunk(self, start: int, end: int, context: int, page_table: torch.Tensor) -> _Chunk:
        mask = None
        if end - start < context:
            last = torch.arange(context - (end - start), context)
            mask = torch.arange(context) <= last[:, None]
        blocks = self._blocks(page_table[None, : self._pages(context)])
        return _Chunk(start, end, context, blocks, mask)


class CpuAttentionStep:
    """The attention of every layer of one step."""

    def __init__(
        self,
        owner: CpuAttention,
        *,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_rows: torch.Tensor,
        decodes: list[_Decodes],
        chunks: list[_Chunk],
    ) -> None:
        layout = owner.layout
        self._layout, self._num_heads = layout, owner.num_heads
        self._cos, self._sin, self._kv_rows = cos, sin, kv_rows
        self._decodes, self._chunks = decodes, chunks
        self._token_rows = owner.arena.view(-1, layout.head_dim)
        self._block_rows = owner.arena.view(-1, layout.head_stride)
        self._scale = layout.head_dim**-0.5

    def attend(self, heads: torch.Tensor, layer: int) -> torch.Tensor:
        """Rotate, write KV, attend.

        heads  [T, H + 2 K, D] queries, keys and values as projected
        -> [T, H * D]
        """
        layout, num_heads = self._layout, self._num_heads
        rotary = heads[:, : num_heads + layout.num_kv_heads]
        swapped = torch.cat(
            (rotary[..., layout.head_dim // 2 :], rotary[..., : layout.head_dim // 2]), dim=-1
        )
        rotated = torch.addcmul(rotary * self._cos, swapped, self._sin)
        values = heads[:, num_heads + layout.num_kv_heads :]
        kv = torch.cat((rotated[:, num_heads:], values), dim=1).view(-1, layout.head_dim)
        rows = self._kv_rows + layer * (layout.layer_stride // layout.head_dim)
        self._token_rows.index_copy_(0, rows, kv)
        q = rotated[:, :num_heads]
        if len(self._decodes) == 1 and self._decodes[0].rows is None:
            return self._attend_decodes(q, self._decodes[0], layer)
        out = heads.new_empty(heads.shape[0], num_heads * layout.head_dim)
        for group in self._decodes:
            assert group.rows is not None
            out[group.rows] = self._attend_decodes(q[group.rows], group, layer)
        for chunk in self._chunks:
            out[chunk.start : chunk.end] = self._attend_chunk(
                q[chunk.start : chunk.end], chunk, layer
            )
        return out

    def _gather(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """blocks [2, S, K, n] -> keys and values [2, S, K, n * B, D]."""
        index = blocks.flatten() + layer * 2 * self._layout.num_kv_heads
        gathered = self._block_rows.index_select(0, index)
        return gathered.view(*blocks.shape[:3], -1, self._layout.head_dim)

    def _attend_decodes(self, q: torch.Tensor, group: _Decodes, layer: int) -> torch.Tensor:
        """q [S, H, D] -> [S, H * D]."""
        kv = self._gather(group.blocks, layer)
        # What lies past a sequence is somebody else's and may not be finite: 0 * NaN is NaN.
        kv.view(-1, self._layout.head_dim).index_fill_(0, group.padding, 0.0)
        grouped = q.reshape(len(q), self._layout.num_kv_heads, -1, self._layout.head_dim)
        out = functional.scaled_dot_product_attention(
            grouped, kv[0], kv[1], attn_mask=group.mask, scale=self._scale
        )
        return out.reshape(len(q), -1)

    def _attend_chunk(self, q: torch.Tensor, chunk: _Chunk, layer: int) -> torch.Tensor:
        """q [n, H, D] -> [n, H * D]."""
        kv = self._gather(chunk.blocks, layer)[:, :, :, : chunk.context]
        k, v = kv.repeat_interleave(self._num_heads // self._layout.num_kv_heads, dim=2)
        out = functional.scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k,
            v,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=self._scale,
        )
        return out.squeeze(0).transpose(0, 1).reshape(len(q), -1)
