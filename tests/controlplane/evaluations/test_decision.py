"""The gate's decision, on planted retrains and at its edges."""

from __future__ import annotations

import collections
import dataclasses
import random

import pytest

from controlplane.evaluations.decision import Decision, Metric, Pair, Policy, Verdict, decide
from tests.controlplane.evaluations.planted import BAD, decisions_of

#: Of each kind.
NUM_DECISIONS = 100
POLICY = Policy()


def smallest_drop(decision: Decision, metric: Metric) -> float:
    [found] = [f for f in decision.findings if f.metric == metric and not f.slice]
    return found.interval.smallest_drop


@pytest.mark.parametrize("kind", BAD)
def test_bad_retrains_are_not_promoted(kind: str) -> None:
    verdicts = collections.Counter(
        decide(decisions_of(kind, seed), POLICY).verdict for seed in range(NUM_DECISIONS)
    )
    assert verdicts[Verdict.PROMOTE] <= NUM_DECISIONS * 0.01, verdicts


def test_good_retrains_are_promoted_and_each_decision_states_its_power() -> None:
    decisions = [decide(decisions_of("good", seed), POLICY) for seed in range(NUM_DECISIONS)]
    verdicts = collections.Counter(decision.verdict for decision in decisions)
    assert verdicts[Verdict.PROMOTE] >= NUM_DECISIONS * 0.95, verdicts
    for decision in decisions:
        assert 0 < smallest_drop(decision, Metric.SCORE) < 0.1
        assert sum("smallest drop that could be seen" in why for why in decision.reasons) == 2


def test_at_the_drop_that_matters_alpha_holds() -> None:
    """The hardest case: truly worse by just what matters."""
    rng, promoted, num = random.Random(5), 0, 400
    for _ in range(num):
        draws = [rng.random() for _ in range(150)]
        pairs = [Pair(score=float(u >= 0.05), live_score=1.0) for u in draws]
        promoted += decide(pairs, POLICY).verdict == Verdict.PROMOTE
    # 1 % of 400 is 4; 11 or more would come by chance once in 300.
    assert promoted <= 11


def test_cases_without_a_difference_do_not_show_that_there_is_none() -> None:
    few = [Pair(score=1.0, live_score=1.0)] * 40
    decision = decide(few, POLICY)
    assert decision.verdict == Verdict.HOLD
    assert "may fall by" in decision.reasons[0] and "cases would show it" in decision.reasons[0]
    assert decide([*few, *few, *few], POLICY).verdict == Verdict.PROMOTE


def test_too_many_leaked_cases_hold_and_few_are_left_out() -> None:
    pairs = decisions_of("good", 1)
    some = [dataclasses.replace(pair, is_leaked=number < 80) for number, pair in enumerate(pairs)]
    decision = decide(some, POLICY)
    assert (decision.verdict, decision.num_leaked) == (Verdict.HOLD, 80)
    assert "80 of 400 cases are in the training's rows" in decision.reasons[0]
    few = [dataclasses.replace(pair, is_leaked=number < 30) for number, pair in enumerate(pairs)]
    decision = decide(few, POLICY)
    assert (decision.verdict, decision.num_cases) == (Verdict.PROMOTE, 370)
    assert any(why.startswith("30 cases left out") for why in decision.reasons)


@pytest.mark.parametrize("pairs", [[], [Pair()] * 50, [Pair(score=1.0, live_score=0.0)] * 9])
def test_nothing_to_compare_holds(pairs: list[Pair]) -> None:
    assert decide(pairs, POLICY).verdict == Verdict.HOLD


def test_values_that_are_no_numbers_count_nowhere() -> None:
    bad = [Pair(score=float("nan"), live_score=1.0), Pair(logprob=float("-inf"), live_logprob=-1.0)]
    decision = decide([*bad, *[Pair(score=1.0, live_score=1.0)] * 120], POLICY)
    assert decision.verdict == Verdict.PROMOTE
    assert decision.findings[0].interval.num == 120
