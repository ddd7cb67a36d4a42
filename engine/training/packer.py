"""Which rows make up a micro-batch, and the tensors of it: rows of many runs without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.training.run import RunRows
from kernels.training import Rows, Segments, make_rows, make_segments


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one run that a micro-batch takes.

    indices  of the rows
    weight   of each answer token's loss: 1 / the answer tokens of the run's whole step
    """

    rows: RunRows
    indices: Sequence[int]
    weight: float

    @property
    def num_tokens(self) -> int:
        return sum(self.rows.lengths[index] for index in self.indices)

    @property
    def num_answers(self) -> int:
        return sum(self.rows.num_answers[index] for index in self.indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one pass through the model; segment i is piece i.

    token_ids      [T] int64
    rows           where each row begins, and its tokens' positions
    segments       where each piece begins
    predicting     [N] int64, the tokens before an answer token
    targets        [N] int64, the answer tokens
    weights        [N] float32
    answer_counts  [pieces] int64, how many of the N are each piece's
    """

    token_ids: torch.Tensor
    rows: Rows
    segments: Segments
    predicting: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    answer_counts: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.segments.num_tokens


def cut_step(lengths: Sequence[int], budget: int) -> list[int]:
    """Return the number of a step's rows in each of its micro-batches: as many as fit.

    lengths  of the step's rows, in order
    -> at least one row each, also where it is longer than the budget; a function of the run's own
       rows alone, so that a run's sums have one order, whoever shares its micro-batches
    """
    counts: list[int] = []
    left = 0
    for length in lengths:
        if counts and length <= left:
            counts[-1] += 1
        else:
            counts.append(1)
            left = budget
        left -= length
    return counts


def pack(pieces: Sequence[Piece], device: torch.device) -> MicroBatch:
    """Join the tensors of these pieces, one after the other."""
    tokens: list[torch.Tensor] = []
    answers: list[torch.Tensor] = []
    for piece in pieces:
        for index in piece.indices:
            own = slice(piece.rows.starts[index], piece.rows.starts[index + 1])
            tokens.append(piece.rows.token_ids[own])
            answers.append(piece.rows.is_answer[own])
    token_ids = torch.cat(tokens).long()
    targets_at = torch.cat(answers).nonzero().flatten()  # never the first of a row
    counts = torch.tensor([piece.num_answers for piece in pieces])
    weights = torch.tensor([piece.weight for piece in pieces], dtype=torch.float64)
    lengths = [piece.rows.lengths[index] for piece in pieces for index in piece.indices]

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return MicroBatch(
        token_ids=there(token_ids),
        rows=make_rows(lengths, device),
        segments=make_segments([piece.num_tokens for piece in pieces], device),
        predicting=there(targets_at - 1),
        targets=there(token_ids[targets_at]),
        weights=there(weights.repeat_interleave(counts).float()),
        answer_counts=there(counts),
    )
