"""An adapter's place in pages: which tile of which projection lies where (docs/memory.md).

`place_tiles` decides from shapes alone; `fill_tiles` writes the tensors into an image of the pages
in host memory, which is then copied page by page into the arena. Offsets are relative to that
image until `TileMap.at` turns them into offsets of the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.adapter_format import AdapterPlan
from engine.config import ModelConfig
from engine.host_values import write_rows
from kernels import NUM_PROJECTIONS, TILE_ROWS, PageLayout

Int64s = npt.NDArray[np.int64]

# Pages left behind with room for a smaller tile; more find little and cost time.
_MAX_OPEN_PAGES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TileMap:
    """Entries `[L * 7, num_tiles]` as in `kernels.LoraTable`, of one adapter.

    Offsets count elements; -1: no tile.
    """

    num_pages: int
    num_tiles: int
    a_offset: Int64s
    b_offset: Int64s
    rows: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]

    def layer_ends(self, page_elems: int) -> list[int]:
        """Of each layer, how many of the first pages hold all that is read up to its end.

        The last layer's are all the pages. Of an image, not of the arena.
        """
        offsets = (self.a_offset, self.b_offset)
        last = [each.reshape(-1, NUM_PROJECTIONS * self.num_tiles).max(1) for each in offsets]
        pages = np.maximum.accumulate(np.maximum(*last) // page_elems + 1)
        pages[-1] = self.num_pages
        ends: list[int] = pages.tolist()
        return ends

    def at(self, pages: list[int], page_elems: int) -> TileMap:
        """The same map with offsets of the arena, image page i lying at `pages[i]`."""
        base = np.asarray(pages, dtype=np.int64) * page_elems

        def move(offset: Int64s) -> Int64s:
            moved = base[offset // page_elems] + offset % page_elems
            return np.where(offset < 0, offset, moved)

        return TileMap(
            num_pages=self.num_pages,
            num_tiles=self.num_tiles,
            a_offset=move(self.a_offset),
            b_offset=move(self.b_offset),
            rows=self.rows,
            scale=self.scale,
        )


class _Packer:
    """First fit into the current page and a few left behind; nothing straddles pages."""

    def __init__(self, page_elems: int) -> None:
        self._page_elems = page_elems
        self._open: list[list[int]] = []  # [page, used elements], the current page last
        self.num_pages = 0

    def place(self, num_elems: int) -> int:
        for entry in reversed(self._open):
            if entry[1] + num_elems <= self._page_elems:
                offset = entry[0] * self._page_elems + entry[1]
                entry[1] += num_elems
                return offset
        self._open.append([self.num_pages, num_elems])
        if len(self._open) > _MAX_OPEN_PAGES:
            self._open.remove(max(self._open[:-1], key=lambda entry: entry[1]))
        self.num_pages += 1
        return (self.num_pages - 1) * self._page_elems


def place_tiles(plan: AdapterPlan, model: ModelConfig, layout: PageLayout) -> TileMap:
    """Where every tile goes, in layer order.

    A projection's tiles are neighbours, to be read as one matrix, except where a page ends. Where
    a page holds fewer than 8 of the widest rows, tiles have fewer rows.
    """
    page_elems = layout.page_elems
    widest = max(max(widths) for widths in model.projection_widths)
    tile_rows = min(TILE_ROWS, page_elems // widest)
    num_tiles = max(-(-target.rank // tile_rows) for target in plan.targets)
    shape = (model.num_layers * NUM_PROJECTIONS, num_tiles)
    a_offset, b_offset = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
    rows, scale = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    packer = _Packer(page_elems)
    for target in plan.targets:
        entry = target.layer * NUM_PROJECTIONS + target.projection
        counts = [min(tile_rows, target.rank - first) for first in range(0, target.rank, tile_rows)]
        rows[entry, : len(counts)] = counts
        scale[entry, : len(counts)] = target.scaling
        in_width, out_width = model.projection_widths[target.projection]
        for offsets, width in ((a_offset, in_width), (b_offset, out_width)):
            sizes = [count * width for count in counts]
            offsets[entry, : len(counts)] = [packer.place(size) for size in sizes]
    return TileMap(
        num_pages=packer.num_pages,
        num_tiles=num_tiles,
        a_offset=a_offset,
        b_offset=b_offset,
        rows=rows,
        scale=scale,
    )


def fill_tiles(
    image: torch.Tensor,
    plan: AdapterPlan,
    tiles: TileMap,
    tensor: Callable[[str], torch.Tensor],
) -> None:
    """Write the adapter's tensors into `image` [num_pages, page_elems] as `tiles` says.

    tensor  gives a tensor of the file by name
    """
    flat = image.view(-1)
    for target in plan.targets:
        entry = target.layer * NUM_PROJECTIONS + target.projection
        matrices = (
            (tiles.a_offset[entry], tensor(target.a_name)),  # [R, in]
            (tiles.b_offset[entry], tensor(target.b_name).T),  # [R, out]
        )
        for offsets, matrix in matrices:
            write_rows(flat, offsets.tolist(), tiles.rows[entry].tolist(), matrix)
