"""Log-probabilities of prompt tokens, for requests that ask for them.

The row of a pass at position p gives the log-probability of the prompt's token p + 1. So every
position of such a prompt is computed once and not taken from the prefix cache. The last matrix is
applied to all these rows, a block at a time; only the requested numbers of a block are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engine.execution.uploads import upload
from engine.request import TokenLogprob
from engine.sequence import Row, Sequence
from kernels import LoraExtras
from kernels.lora.vocab import sampled

# Largest size of one block's logits in fp32, in bytes; computing the scores takes twice as much in
# addition.
_BLOCK_BYTES = 32 << 20

# x [R, E] of scored rows, and their adapters' extras -> logits [R, V]
Head = Callable[[torch.Tensor, LoraExtras | None], torch.Tensor]
# Rows of the step, ascending -> the extras of their adapters, by their places among these rows
ExtrasOf = Callable[[npt.NDArray[np.int64]], LoraExtras | None]


@dataclass(frozen=True, slots=True)
class _Span:
    """Scored positions of one sequence: `first` and those that follow it."""

    sequence: Sequence
    first: int
    count: int


class Scores:
    """One step's prompt log-probabilities: planned with the batch, computed by the pass, then read.

    rows     [M] int64, the scored rows of the pass, ascending
    targets  [M] int64, the token that follows each in its prompt
    num_top  how many of the most likely tokens are kept for each row
    extras   of the rows' adapters; None: no adapter changes the last matrix
    """

    def __init__(
        self,
        rows: torch.Tensor,
        targets: torch.Tensor,
        num_top: int,
        extras: LoraExtras | None = None,
        spans: SequenceOf[_Span] = (),
    ) -> None:
        self.rows, self._targets, self._num_top = rows, targets, num_top
        self._extras, self._spans = extras, spans
        self._found: list[tuple[torch.Tensor, ...]] = []

    def compute(self, x: torch.Tensor, head: Head, vocab_size: int) -> None:
        """Score x [M, E], the hidden states of `rows`; the host waits for nothing."""
        size = max(1, _BLOCK_BYTES // (4 * vocab_size))
        self._found = []
        for low in range(0, len(x), size):
            high = min(low + size, len(x))
            logits = head(x[low:high], _extras_between(self._extras, low, high)).float()
            own = logits.gather(1, self._targets[low:high, None])
            total = logits.logsumexp(-1, keepdim=True)
            values, token_ids = logits.topk(self._num_top)
            ranks = (logits > own).sum(-1) + 1
            self._found.append(((own - total).squeeze(1), ranks, values - total, token_ids))

    def tell(self) -> list[Sequence]:
        """Wait for the step and add each prompt's log-probabilities to its sequence.

        Returns the sequences whose numbers overflowed.
        """
        entries = self._entries()
        overflowed = []
        for span in self._spans:
            own = [next(entries) for _ in range(span.count)]
            sequence = span.sequence
            if sequence.has_ended or sequence.prompt_logprobs is None:
                continue
            if any(math.isnan(entry.logprob) for entry in own):
                overflowed.append(sequence)
            sequence.prompt_logprobs.add(span.first, own)
        return overflowed

    def _entries(self) -> Iterator[TokenLogprob]:
        targets = iter(self._targets.tolist())
        for found in self._found:
            for logprob, rank, values, token_ids in zip(*(t.tolist() for t in found), strict=True):
                top = tuple(zip(token_ids, values, strict=True))
                yield TokenLogprob(next(targets), logprob, top, rank)


def plan_scores(
    rows: SequenceOf[Row],
    query_start: npt.NDArray[np.int32],
    device: torch.device | str,
    extras_of: ExtrasOf,
) -> Scores | None:
    """Plan the prompt log-probabilities of a step of these rows; None: there are none.

    query_start  [S + 1] the first row of the pass of each
    """
    if all(row.sequence.prompt_logprobs is None for row in rows):
        return None
    spans: list[_Span] = []
    found: list[npt.NDArray[np.int64]] = []
    targets: list[int] = []
    num_top = 0
    for row, start in zip(rows, query_start.tolist(), strict=False):
        scored, sequence = row.scored, row.sequence
        if not scored or sequence.prompt_logprobs is None:
            continue
        spans.append(_Span(sequence, scored.start, len(scored)))
        found.append(np.array(scored, np.int64) + (start - sequence.num_computed))
        targets += sequence.token_ids[scored.start + 1 : scored.stop + 1]
        num_top = max(num_top, sequence.prompt_logprobs.num_top)
    if not spans:
        return None
    at = np.concatenate(found)
    on_device = upload([at, np.array(targets, np.int64)], device)
    extras = extras_of(at)
    if extras is not None:
        extras = sampled(extras, on_device[0])
    return Scores(on_device[0], on_device[1], num_top, extras, spans)


def _extras_between(extras: LoraExtras | None, low: int, high: int) -> LoraExtras | None:
    """Return the extras of the rows from `low` to `high` alone."""
    if extras is None:
        return None
    segments = tuple(
        replace(
            segment,
            first=min(max(segment.first, low), high) - low,
            last=min(max(segment.last, low), high) - low,
        )
        for segment in extras.segments
    )
    return replace(extras, segments=segments, row_adapter=extras.row_adapter[low:high])
