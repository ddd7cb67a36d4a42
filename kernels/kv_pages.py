"""PageLayout: how keys and values lie inside one page of the arena."""

from __future__ import annotations

from dataclasses import dataclass

# A kernel with a sliding window may read up to this many keys, less one, before the window.
KEYS_READ_TOGETHER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """A page is `[L, 2, K, B, D]`: per layer the keys, then the values, of B consecutive tokens.

    The arena is `[P, page_elems]`. A token's slot is `page * page_size + offset in the page`; its
    key for one layer and head is the D elements at `page * page_elems + element_offset(...)`.
    Strides count elements, not bytes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16

    @property
    def head_stride(self) -> int:
        return self.page_size * self.head_dim

    @property
    def value_stride(self) -> int:
        """Elements from a token's key to the same token's value."""
        return self.num_kv_heads * self.head_stride

    @property
    def layer_stride(self) -> int:
        return 2 * self.value_stride

    @property
    def page_elems(self) -> int:
        return self.num_layers * self.layer_stride
