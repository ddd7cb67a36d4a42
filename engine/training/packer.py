"""Which rows make up a micro-batch, and the tensors of it: rows of many runs without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.training.policy import PackedPolicy, Policy
from engine.training.preferences import PackedPairs, Pairs, row_sums
from engine.training.run import RunRows
from kernels.training import Rows, Segments, make_rows, make_segments


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one run that a micro-batch takes.

    indices  of the rows
    weight   of each answer token's loss: 1 / the answer tokens of the run's whole step; of each
             pair's: 1 / the step's pairs
    pairs    of the run, whose rows these are, a whole number of pairs; None: no pairs are compared
    policy   of the run, whose rows these are: answers that were sampled and rewarded
    """

    rows: RunRows
    indices: Sequence[int]
    weight: float
    pairs: Pairs | None = None
    policy: Policy | None = None

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
    weights        [N] float32; 1 in pairs and in sampled answers, which `reweigh` weighs
    answer_counts  [pieces] int64, how many of the N are each piece's
    row_answers    [rows] int64, how many are each row's; `row_counts`, the rows of each piece
    pairs          None: no piece has pairs
    policy         None: no piece has sampled answers
    """

    token_ids: torch.Tensor
    rows: Rows
    segments: Segments
    predicting: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    answer_counts: torch.Tensor
    row_answers: torch.Tensor
    row_counts: Sequence[int]
    pairs: PackedPairs | None
    policy: PackedPolicy | None

    @property
    def num_tokens(self) -> int:
        return self.segments.num_tokens

    @property
    def reweigh(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return the function that weighs answer tokens' gradients by all losses, if one does."""
        if self.pairs is None and self.policy is None:
            return None

        def factors(losses: torch.Tensor) -> torch.Tensor:
            pairs, policy = self.pairs, self.policy
            if pairs is None:
                assert policy is not None
                return policy.factors(losses)
            of_pairs = pairs.factors(losses, self.row_answers)
            return of_pairs if policy is None else of_pairs * policy.factors(losses)

        return factors

    def measure(self, losses: torch.Tensor) -> list[dict[str, float]]:
        """Return each piece's part of its run's figures: `loss`, and what its method measures.

        losses  [N], of the answer tokens, not weighted
        """
        weighed = losses.double() * self.weights
        sums = torch.segment_reduce(weighed, "sum", lengths=self.answer_counts).tolist()
        found = [{"loss": loss} for loss in sums]
        if self.pairs is not None:
            for piece, figures in self.pairs.measure(losses, self.row_answers):
                found[piece] = figures
        if self.policy is not None:
            for piece, figures in self.policy.measure(losses):
                found[piece] = figures
        return found

    def log_probabilities(self, losses: torch.Tensor) -> list[torch.Tensor]:
        """Return those of the answers of each piece's rows: [rows] float64, on the host."""
        sums = row_sums(losses, self.row_answers)
        return list(torch.split((-sums).cpu(), list(self.row_counts)))


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


def cut_pieces(
    rows: RunRows,
    examples: Sequence[int],
    budget: int,
    weight: float,
    pairs: Pairs | None = None,
    policy: Policy | None = None,
) -> list[Piece]:
    """Return the pieces of these examples of a run: rows, or with `pairs` pairs of rows."""
    size = 1 if pairs is None else 2
    indices = [size * example + place for example in examples for place in range(size)]
    lengths = example_lengths(rows, size)
    pieces, first = [], 0
    for count in cut_step([lengths[example] for example in examples], budget):
        pieces.append(Piece(rows, indices[first : first + size * count], weight, pairs, policy))
        first += size * count
    return pieces


def example_lengths(rows: RunRows, size: int) -> list[int]:
    """Return the tokens of each example, which has `size` rows."""
    starts = range(0, len(rows), size)
    return [sum(rows.lengths[first : first + size]) for first in starts]


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
    weights = torch.tensor(
        [1.0 if piece.pairs or piece.policy else piece.weight for piece in pieces],
        dtype=torch.float64,
    )
    row_answers = [piece.rows.num_answers[index] for piece in pieces for index in piece.indices]
    compared = [
        (number, piece.indices, piece.weight, piece.pairs) for number, piece in enumerate(pieces)
    ]
    row_counts = [len(piece.indices) for piece in pieces]
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
        row_answers=there(torch.tensor(row_answers)),
        row_counts=row_counts,
        pairs=PackedPairs.of(compared, device),
        policy=PackedPolicy.of([(p.policy, p.indices, p.num_answers) for p in pieces], device),
    )
