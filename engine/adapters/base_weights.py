"""BaseWeights: the base's matrices one by one, for adapters whose values depend on them."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.adapters.plan import EMBEDDING, HEAD, Site
from engine.model.config import ModelConfig
from engine.model.weights import Matrix, Weights
from kernels.lora.table import FUSED


class FusedWeights(Protocol):
    """Weights that are kept fused: q, k and v in one matrix, gate and up in another."""

    def fused(self, layer: int, name: str) -> Matrix:
        """Return `qkv`, `o`, `gate_up` or `down` of a layer, [out, in]; it may be a copy."""

    def fused_bias(self, layer: int, name: str) -> torch.Tensor | None:
        """Return that matrix's bias [out]; None: it has none."""

    def embedding(self) -> torch.Tensor:
        """Return the embedding [V, E]."""

    def lm_head(self) -> torch.Tensor:
        """Return the LM head [V, E]."""


class PlainWeights:
    """`FusedWeights` over weights that are kept as they were loaded."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def fused(self, layer: int, name: str) -> Matrix:
        matrix: Matrix = getattr(self._weights.layers[layer], name)
        return matrix

    def fused_bias(self, layer: int, name: str) -> torch.Tensor | None:
        bias: torch.Tensor | None = getattr(self._weights.layers[layer], f"{name}_bias")
        return bias

    def embedding(self) -> torch.Tensor:
        return self._weights.embedding

    def lm_head(self) -> torch.Tensor:
        return self._weights.lm_head


class BaseWeights:
    """Reads the decoder's weights. Loader threads may call it while the engine steps."""

    def __init__(self, model: ModelConfig, source: FusedWeights) -> None:
        self._source, self._model = source, model

    def _place(self, site: Site) -> tuple[str, int, int]:
        """Return the fused matrix that a projection lies in, and which rows it is."""
        widths = self._model.widths(site.layer)
        name, first = next(
            (name, sum(widths[p][1] for p in projections[: projections.index(site.projection)]))
            for name, projections in FUSED.items()
            if site.projection in projections
        )
        return name, first, first + widths[site.projection][1]

    def matrix(self, site: Site) -> torch.Tensor:
        """Return W [out, in] of y = W x, on the engine's device; an embedding is [E, V].

        What is kept quantised comes as the values that products multiply by, in float32.
        """
        if site.projection == EMBEDDING:
            return self.vocabulary(site).T
        if site.projection == HEAD:
            return self.vocabulary(site)
        name, low, high = self._place(site)
        matrix = self._source.fused(site.layer, name)
        if isinstance(matrix, torch.Tensor):
            return matrix[low:high]
        return matrix.rows(low, high).dense()

    def bias(self, site: Site) -> torch.Tensor | None:
        """Return b [out] of y = W x + b, fp32 in host memory; None: there is none."""
        if site.projection >= EMBEDDING:
            return None
        name, low, high = self._place(site)
        bias = self._source.fused_bias(site.layer, name)
        return None if bias is None else bias[low:high].float().cpu()

    def vocabulary(self, site: Site) -> torch.Tensor:
        """Return the embedding or the LM head as checkpoints have it, [V, E]."""
        is_embedding = site.projection == EMBEDDING
        return self._source.embedding() if is_embedding else self._source.lm_head()
