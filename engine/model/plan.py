"""Plan: what a model's layers compute, as data.

A family's file (`engine.model.families`) makes it from config.json. The decoder, its form on a GPU
and the trainer all read it; what is not set is as in Llama.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.model.rope import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The arithmetic of a decoder's layers.

    eps       of all norms
    rotation  of q and k
    windows   each layer's sliding window in tokens, None for full attention; empty: all layers have
              full attention
    qk_norm   an RMSNorm of q and k before they are rotated: of each head; None: there is none
    """

    eps: float
    rotation: Rotation
    windows: tuple[int | None, ...] = ()
    qk_norm: Literal["head"] | None = None
