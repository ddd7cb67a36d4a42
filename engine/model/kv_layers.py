"""KvLayers: the places of keys and values in a page, where layers have heads of several shapes.

A page is cut into equal units, as large as the smallest layer's keys and values. A layer has as
many as it needs, side by side; the largest layers come first. So the page is one that is laid out
for each shape alone, and a layer is one of that layout's layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from contract.layer_shapes import LayerShape
from engine.errors import UnsupportedModel
from kernels.kv_pages import PageLayout


class KvLayers:
    """The places of layers with these shapes.

    page    (layers, heads, width) of the page, as if all layers were like the smallest
    kinds   (heads, width) of each shape
    places  each layer's shape in `kinds`, and its place in a page that is laid out for that shape;
            of a layer without keys and values of its own, those of the layer whose it reads
    """

    def __init__(self, shapes: Sequence[LayerShape]) -> None:
        own = [i for i, shape in enumerate(shapes) if shape.keys_of is None]
        kinds = {(shapes[i].kv_heads, shapes[i].head_dim) for i in own}
        self.kinds = sorted(kinds, key=lambda kind: (-kind[0] * kind[1], kind))
        sizes = [heads * width for heads, width in self.kinds]
        for larger, smaller in itertools.pairwise(sizes):
            if larger % smaller:
                raise UnsupportedModel(
                    f"config.json: keys of {larger} and of {smaller} numbers do not lie in one "
                    "page, as the second does not divide the first",
                    param="head_dim",
                )
        found: dict[int, tuple[int, int]] = {}
        end = 0  # in numbers of a token's keys
        for kind, size in enumerate(sizes):
            for i in own:
                if (shapes[i].kv_heads, shapes[i].head_dim) == self.kinds[kind]:
                    found[i] = kind, end // size
                    end += size
        end = -(-end // sizes[0]) * sizes[0]
        self.page = end // sizes[-1], *self.kinds[-1]
        owners = (i if shape.keys_of is None else shape.keys_of for i, shape in enumerate(shapes))
        self.places = tuple(found[owner] for owner in owners)

    def layouts(self, layout: PageLayout) -> list[PageLayout]:
        """Return the page's layout for each of `kinds`."""
        numbers = layout.num_layers * layout.num_kv_heads * layout.head_dim
        return [
            replace(
                layout, num_layers=numbers // (heads * width), num_kv_heads=heads, head_dim=width
            )
            for heads, width in self.kinds
        ]

    def by_place(self, kind: int, layout: PageLayout, values: Sequence[Any]) -> list[Any]:
        """Return each layer's value at its place in the kind's layout; another's where none is."""
        own = {place: i for i, (each, place) in enumerate(self.places) if each == kind}
        return [values[own.get(place, min(own.values()))] for place in range(layout.num_layers)]


class AttentionByKind:
    """`engine.execution.decoder.Attention` of layers with heads of several shapes.

    steps  the attention of each of `KvLayers.kinds`
    """

    def __init__(self, steps: Sequence[Any], layers: KvLayers) -> None:
        self._steps, self._places = steps, layers.places

    def attend(
        self, heads: torch.Tensor, layer: int, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """heads [T, H + 2 K, D], or the queries alone, [T, H, D] -> [T, H * D]"""
        kind, place = self._places[layer]
        out: torch.Tensor = self._steps[kind].attend(heads, place, sinks)
        return out
