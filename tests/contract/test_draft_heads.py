"""What an upload with draft heads has to be like."""

from __future__ import annotations

import pytest

from contract.adapters.draft_heads import MAX_HEAD_RANK, fit_heads, head_names, medusa_problem

HIDDEN = 8


def shapes(*ranks: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for index, rank in enumerate(ranks):
        down, up = head_names(index)
        found |= {down: (rank, HIDDEN), up: (HIDDEN, rank)}
    return found


def test_heads_come_in_their_order_with_their_ranks() -> None:
    given = {**dict(reversed(shapes(3, 8, 1).items())), "model.lora_A.weight": (1, 2)}
    heads, problems = fit_heads(given, HIDDEN)
    assert [head.rank for head in heads] == [3, 8, 1] and not problems
    assert (heads[2].down, heads[2].up) == head_names(2)
    assert fit_heads({"model.lora_A.weight": (1, 2)}, HIDDEN) == ((), [])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"draft_heads.0.down.weight": (3,)}, "draft_heads.0.down.weight"),
        ({"draft_heads.0.down.weight": (9, HIDDEN)}, "draft_heads.0.down.weight"),
        ({"draft_heads.0.up.weight": (3, HIDDEN)}, "draft_heads.0.up.weight"),
        ({"draft_heads.2.up.weight": (HIDDEN, 1)}, "draft_heads.2.down.weight"),
        ({"draft_heads.4.up.weight": (HIDDEN, 1)}, "draft_heads.4.up.weight"),
        ({"draft_heads.00.up.weight": (HIDDEN, 1)}, "draft_heads.00.up.weight"),
        ({"draft_heads.0.up.bias": (HIDDEN,)}, "draft_heads.0.up.bias"),
        ({"draft_heads.x": (HIDDEN,)}, "draft_heads.x"),
    ],
)
def test_each_fault_names_its_tensor(changes: dict[str, tuple[int, ...]], named: str) -> None:
    heads, problems = fit_heads({**shapes(3, 2), **changes}, HIDDEN)
    assert heads == ()
    assert named in [problem.field for problem in problems]


def test_a_gap_is_a_fault_and_ranks_are_bounded() -> None:
    given = shapes(1, 1, 1)
    for name in head_names(1):
        del given[name]
    assert [problem.field for problem in fit_heads(given, HIDDEN)[1]] == [head_names(1)[0]]
    wide, rank = 1 << 20, MAX_HEAD_RANK + 1
    down, up = head_names(0)
    assert fit_heads({down: (rank, wide), up: (wide, rank)}, wide)[1]


def test_speculators_of_lorax_are_named() -> None:
    for name in ("medusa_head.0.0.linear.weight", "0.0.linear.weight", "2.1.weight"):
        problem = medusa_problem(name)
        assert problem is not None and "LoRAX" in problem.message
    assert medusa_problem("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight") is None
