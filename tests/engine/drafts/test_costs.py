"""What one more row of a step costs decides whether a draft pays."""

from __future__ import annotations

import pytest

from engine.drafts.costs import CPU, GPU

#: Of a card on which the 65th row is dear.
TIMES = ((1, 4.0), (64, 5.0), (96, 7.0))


@pytest.mark.parametrize("num_sampling", [1, 16, 64])
def test_a_draft_pays_if_it_gives_more_tokens_than_its_row_costs(num_sampling: int) -> None:
    costs = GPU.measured(TIMES)
    before = costs.least_chance(num_sampling, num_sampling, 0)
    assert before == pytest.approx(
        num_sampling * (1 / 63 if num_sampling < 64 else 2 / 32) / (4 + (num_sampling - 1) / 63)
    )
    assert costs.least_chance(num_sampling, 70, 2) > 2 * costs.least_chance(num_sampling, 50, 0)
    # Beyond what was measured a row costs what the last ones did.
    assert costs.least_chance(16, 96, 0) == pytest.approx(16 * (2 / 32) / 7.0)


def test_a_row_is_never_free_and_a_step_of_more_rows_never_shorter() -> None:
    costs = GPU.measured(((1, 4.0), (8, 3.9), (16, 4.0)))
    assert [took for _, took in costs.times] == pytest.approx([4.0, 4.028, 4.06])
    assert GPU.measured(()) is GPU and GPU.measured(((1, 4.0),)) is GPU


def test_costs_that_were_not_measured_are_those_of_the_kind_of_device() -> None:
    assert CPU.least_chance(4, 4, 2) == pytest.approx(4 * 0.1 / 1.6)
    assert GPU.least_chance(64, 64, 0) == pytest.approx(64 * 0.004 / (1 + 0.004 * 64))
