"""What goes into a micro-batch."""

from __future__ import annotations

import itertools

import torch

from engine.training.packer import Piece, cut_step, pack
from engine.training.run import RunRows
from tests.engine.training.scenes import make_rows


def test_a_step_is_cut_by_its_own_rows_alone() -> None:
    assert cut_step([5, 5, 5, 5], 10) == [2, 2]
    assert cut_step([5, 5, 5], 14) == [2, 1]
    assert cut_step([30, 1, 1, 30, 9], 10) == [1, 2, 1, 1]
    assert cut_step([10], 10) == [1]
    assert cut_step([], 10) == []


def test_pieces_lie_one_after_the_other_without_padding() -> None:
    one = RunRows.of([([1, 2, 3, 4], [True, False, True, True]), ([5, 6], [False, True])])
    other = RunRows.of([([7, 8, 9], [False, True, False])])
    batch = pack([Piece(one, [1, 0], 0.25), Piece(other, [0], 1.0)], torch.device("cpu"))
    assert batch.token_ids.tolist() == [5, 6, 1, 2, 3, 4, 7, 8, 9]
    assert batch.rows.bounds == (0, 2, 6, 9)
    assert batch.rows.positions.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2]
    assert batch.segments.bounds == (0, 6, 9)
    assert batch.predicting.tolist() == [0, 3, 4, 6]
    assert batch.targets.tolist() == [6, 3, 4, 8]
    assert batch.weights.tolist() == [0.25, 0.25, 0.25, 1.0]
    assert batch.answer_counts.tolist() == [3, 1]


def test_every_row_is_packed_once_whatever_the_budget() -> None:
    rows = make_rows(5, 40)
    for budget in (1, 17, 50, 10_000):
        counts = cut_step(rows.lengths, budget)
        assert sum(counts) == len(rows) and min(counts) > 0
        numbers = iter(range(len(rows)))
        seen: list[int] = []
        for count in counts:
            piece = Piece(rows, list(itertools.islice(numbers, count)), 1.0)
            assert piece.num_tokens <= budget or count == 1
            seen += pack([piece], torch.device("cpu")).token_ids.tolist()
        assert seen == rows.token_ids.tolist()
