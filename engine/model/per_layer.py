"""Per-layer embeddings: what Gemma 4 adds behind each layer, by the token and its embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from kernels.rms_norm import rms_norm_ref


class PerLayerWeights(NamedTuple):
    """The weights of all layers' inputs; a layer's has P numbers."""

    embedding: torch.Tensor  # [V, L P]
    projection: torch.Tensor  # [L P, E]
    norm: torch.Tensor  # [P]

    def inputs(self, token_ids: torch.Tensor, hidden: torch.Tensor, eps: float) -> torch.Tensor:
        """token_ids [T], their embeddings [T, E] -> [T, L, P]"""
        width = len(self.norm)
        scale = torch.tensor(width**0.5, dtype=hidden.dtype).item()  # rounded as Gemma does
        own = functional.embedding(token_ids, self.embedding) * scale
        seen = functional.linear(hidden, self.projection) * hidden.shape[1] ** -0.5
        normed = rms_norm_ref(seen.view(len(hidden), -1, width), self.norm, eps)
        inputs: torch.Tensor = (normed + own.view_as(normed)) * 2.0**-0.5
        return inputs


class PerLayerGate(NamedTuple):
    """The weights with which one layer takes its input."""

    gate: torch.Tensor  # [P, E]
    projection: torch.Tensor  # [E, P]
    norm: torch.Tensor  # [E]

    def added(self, hidden: torch.Tensor, taken: torch.Tensor, eps: float) -> torch.Tensor:
        """hidden [T, E], the layer's input [T, P] -> what is added to hidden; by autograd"""
        gates = functional.gelu(functional.linear(hidden, self.gate), approximate="tanh")
        return rms_norm_ref(functional.linear(gates * taken, self.projection), self.norm, eps)
