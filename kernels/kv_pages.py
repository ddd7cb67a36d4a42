"""PageLayout: the arrangement of keys and values inside one page of the arena."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.fp8 import FP8, FP8_MAX

# A kernel with a sliding window may read up to this many keys, less one, before the window.
KEYS_READ_TOGETHER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """A page is `[L, 2, K, B, D]`: per layer the keys, then the values, of B consecutive tokens.

    The arena is `[P, page_elems]`. A token's slot is `page * page_size + offset in the page`; its
    key for one layer and head is the D numbers at `page * page_numbers + element_offset(...)` of
    `kv(arena)`. Strides count numbers, not bytes.

    per_element  keys' and values' numbers in an element of the arena; 1: they have its type; more:
                 they are E4M3, and a page takes a half or a quarter of the bytes
    scales       each layer's (scale of keys, scale of values): what is stored is divided by it;
                 empty: all are 1
    tile_per_element  the same of adapters' tiles: numbers in an element; more than 1: E4M3
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    per_element: int = 1
    scales: tuple[tuple[float, float], ...] = ()
    tile_per_element: int = 1

    @property
    def is_fp8(self) -> bool:
        return self.per_element > 1

    @property
    def head_stride(self) -> int:
        return self.page_size * self.head_dim

    @property
    def value_stride(self) -> int:
        """Numbers from a token's key to the same token's value."""
        return self.num_kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        return 2 * self.value_stride

    @property
    def page_numbers(self) -> int:
        return self.num_layers * self.layer_stride

    @property
    def page_elems(self) -> int:
        return self.page_numbers // self.per_element

    def kv(self, arena: torch.Tensor) -> torch.Tensor:
        """View the arena [P, page_elems] as keys and values, [P, page_numbers]."""
        return arena.view(FP8) if self.is_fp8 else arena

    def tiles(self, arena: torch.Tensor) -> torch.Tensor:
        """View the arena as the numbers of adapters' tiles."""
        return arena.view(FP8) if self.tile_per_element > 1 else arena

    def scales_of(self, layer: int) -> tuple[float, float]:
        """Return the factors of a layer's stored keys and stored values."""
        return self.scales[layer] if self.scales else (1.0, 1.0)

    def stored(self, x: torch.Tensor, scale: float, arena: torch.Tensor) -> torch.Tensor:
        """Return keys or values as the arena keeps them."""
        if not self.is_fp8:
            return x.to(arena.dtype)
        return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
