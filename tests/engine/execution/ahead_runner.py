"""A GPU runner's duties over the CPU's decoder, so that running ahead can be played at speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from engine import Engine
from engine.execution.batch import Batch
from engine.execution.gpu_runner import Tokens
from engine.execution.mask_uploads import Masks
from engine.sampling.sampler import Draw
from kernels import apply_bitmask
from kernels.sampling import fill_unread_ref, mark_ref

PAGE_SIZE = 16


class AheadRunner:
    """Chooses tokens as `GpuRunner` does, before the engine reads those of the step before.

    Counts how steps were launched: from known tokens, from unread ones, as the same rows again.
    """

    def __init__(self, engine: Engine) -> None:
        self._runner: Any = engine._runner
        self._chosen = torch.empty(0, dtype=torch.int64)
        self._last: Batch | None = None
        self._draw: Draw | None = None
        self.counts = {"known": 0, "unread": 0, "same": 0}
        self._runner._gpu = self

    def run(self, batch: Batch) -> torch.Tensor:
        self.counts["unread" if batch.has_unread else "known"] += 1
        return self._forward(batch)

    def start(self, batch: Batch, draw: Draw | None, masks: Masks | None = None) -> Tokens:
        self._draw = draw
        can_replay = batch.max_new == 1 and len(batch.sample_rows) == len(batch.token_ids)
        return self._launched(self.run(batch), can_replay, masks)

    def replay(
        self, new_pages: Sequence[tuple[int, int, int]], masks: Masks | None = None
    ) -> Tokens:
        self.counts["same"] += 1
        last = self._last
        assert last is not None
        width = max([last.page_tables.shape[1], *(column + 1 for _, column, _ in new_pages)])
        tables = torch.zeros(len(last.page_tables), width, dtype=torch.int32)
        tables[:, : last.page_tables.shape[1]] = last.page_tables
        for row, column, page in new_pages:
            tables[row, column] = page
        positions = last.positions + 1
        pages = tables.gather(1, (positions // PAGE_SIZE)[:, None]).squeeze(1).long()
        batch = replace(
            last,
            token_ids=self._chosen.clone(),
            positions=positions,
            slots=pages * PAGE_SIZE + positions % PAGE_SIZE,
            context_lens=last.context_lens + 1,
            contexts=last.contexts + 1,
            page_tables=tables,
        )
        return self._launched(self._forward(batch), can_replay=True, masks=masks)

    def _forward(self, batch: Batch) -> torch.Tensor:
        if batch.has_unread:
            fill_unread_ref(batch.token_ids, self._chosen)
            batch = replace(batch, has_unread=False)
        self._last = batch
        runner = self._runner
        logits: torch.Tensor = runner._decoder(
            batch, runner._attention(batch), runner._adapters(batch)
        )
        return logits

    def _launched(self, logits: torch.Tensor, can_replay: bool, masks: Masks | None) -> Tokens:
        tokens = Tokens(can_replay=can_replay)
        tokens.later = partial(self._choose, tokens, logits, masks)
        if masks is None:
            tokens.choose()
        return tokens

    def _choose(self, tokens: Tokens, logits: torch.Tensor, masks: Masks | None) -> None:
        if masks is not None:
            words = np.zeros((len(logits), -(-logits.shape[1] // 32)), np.int32)
            rows = masks.fill(words)
            apply_bitmask(logits, torch.from_numpy(words), torch.tensor(rows, dtype=torch.int64))
        self._chosen = logits.argmax(-1)
        marked = mark_ref(logits, self._chosen)
        drawn = None if self._draw is None else self._draw.launch(logits, self._chosen, marked)
        tokens.host = (marked if drawn is None else drawn.marked).clone()
        tokens.drawn = drawn
