"""ExpertLora: LoRA of routed experts, whose tokens are some of each segment's."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.lora.apply import lora_expand, lora_shrink
from kernels.lora.table import LoraBatch


class ExpertLora:
    """One step's adapters that change experts.

    arena  any shape, read as flat
    """

    def __init__(self, lora: LoraBatch, arena: torch.Tensor, num_layers: int, num: int) -> None:
        self._arena, self._num_layers, self._num = arena, num_layers, num
        changes = torch.tensor((*lora.has_experts, False), device=lora.seg_adapter.device)
        own = torch.where(changes[lora.seg_adapter], lora.seg_adapter, -1)
        self._lora = replace(lora, seg_adapter=own, extras=None)

    def add(
        self,
        tokens: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        layer: int,
        expert: int,
        projections: tuple[int, ...],
        out_offsets: tuple[int, ...],
    ) -> None:
        """Add to y [N, sum of out] what the adapters of an expert make of x [N, in], in place.

        tokens  [N] the rows of the step that these are, ascending
        """
        bounds = torch.searchsorted(tokens, self._lora.seg_indptr.to(tokens.dtype))
        lora = replace(self._lora, seg_indptr=bounds)
        place = self._num_layers + layer * self._num + expert
        h = lora_shrink(x, self._arena, lora, place, projections)
        lora_expand(h, self._arena, lora, place, projections, y, out_offsets)
