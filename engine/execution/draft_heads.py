"""DraftHeads: computes the guesses of adapters' draft heads.

`contract.adapters.draft_heads` says what a head computes. The heads lie in the adapter's pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.adapters.tiles import HeadMap
from kernels.lora.vocab import block_views


@dataclass(slots=True)
class States:
    """The LM head's inputs in one step.

    x  [N, E], a row for each row of the logits; None: the step has not run
    """

    x: torch.Tensor | None = None


class DraftHeads:
    """Computes the heads of several sequences together: the LM head is read once.

    arena    [P, page_elems]
    lm_head  x [N, E] -> logits [N, V]: the base's own
    """

    def __init__(
        self, arena: torch.Tensor, lm_head: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._arena, self._lm_head = arena, lm_head

    def guess(self, asked: Sequence[tuple[torch.Tensor, Sequence[HeadMap]]]) -> list[list[int]]:
        """Return for each (x [E], heads) one token of each head."""
        if not asked:
            return []
        rows = [self._apply(x, head) for x, heads in asked for head in heads]
        tokens = iter(self._lm_head(torch.stack(rows)).argmax(-1).tolist())
        return [[next(tokens) for _ in heads] for _, heads in asked]

    def _apply(self, x: torch.Tensor, head: HeadMap) -> torch.Tensor:
        """Return x + silu(up @ (down @ x)), [E]."""
        inner = torch.cat([block @ x for _, _, block in block_views(self._arena, head.down)])
        outer = torch.cat([block @ inner for _, _, block in block_views(self._arena, head.up)])
        return x + functional.silu(outer)
