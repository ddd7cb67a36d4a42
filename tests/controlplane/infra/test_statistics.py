"""Statistics of canaries and of the gate, against simulated truths."""

from __future__ import annotations

import math
import random

import pytest

from controlplane.infra.statistics import (
    log_evidence,
    lower_bound,
    mean_interval,
    quantile_bounds,
    rate_interval,
)


def test_equal_rates_are_told_apart_no_oftener_than_the_risk() -> None:
    """Without a margin, where the hypothesis is hardest to keep, and looking all the time."""
    rng = random.Random(18)
    goal, alarms, num_runs = math.log(1 / 0.05), 0, 100
    for _ in range(num_runs):
        mine, theirs = [0, 0], [0, 0]
        for number in range(600):
            pair = mine if number % 2 else theirs
            pair[0] += rng.random() < 0.1
            pair[1] += 1
            if number % 10 == 9 and log_evidence((*mine,), (*theirs,), 0.0) >= goal:  # type: ignore[arg-type]
                alarms += 1
                break
    assert alarms <= 0.05 * num_runs


def test_evidence_grows_with_the_counts_and_shrinks_with_the_margin() -> None:
    assert log_evidence((30, 100), (10, 1000), 0.02) > log_evidence((15, 50), (5, 500), 0.02) > 0
    assert log_evidence((30, 100), (10, 1000), 0.10) < log_evidence((30, 100), (10, 1000), 0.02)


@pytest.mark.parametrize(
    ("worse", "reference"),
    [((0, 0), (0, 10)), ((10, 10), (0, 0)), ((1, 100), (1, 100)), ((1, 100), (100, 100))],
)
def test_there_is_no_evidence_without_a_difference(
    worse: tuple[int, int], reference: tuple[int, int]
) -> None:
    assert log_evidence(worse, reference, 0.02) == -math.inf


def test_extreme_counts_have_finite_evidence() -> None:
    for worse, reference in (((100, 100), (0, 100)), ((10**6, 10**6), (0, 10**6))):
        assert 10 < log_evidence(worse, reference, 0.02) < math.inf
        assert 10 < log_evidence(worse, reference, 0.0) < math.inf
    at_the_edge = log_evidence(
        (10**6, 10**6), (979_999_999, 10**9), 0.02
    )  # 1 less a rate rounds to 0
    assert -math.inf < at_the_edge < 0


@pytest.mark.parametrize(("events", "trials"), [(0, 1), (0, 500), (7, 7), (3, 20), (500, 1000)])
def test_an_interval_holds_its_rate(events: int, trials: int) -> None:
    low, high = rate_interval(events, trials, 0.01)
    assert 0 <= low <= events / trials <= high <= 1
    assert (low == 0) == (events == 0)
    assert (high == 1) == (events == trials)
    narrow = rate_interval(events * 100, trials * 100, 0.01)
    assert narrow[1] - narrow[0] < high - low
    assert rate_interval(0, 0, 0.01) == (0.0, 1.0)


def test_an_interval_holds_the_truth_at_all_moments() -> None:
    rng = random.Random(18)
    misses = 0
    for _ in range(100):
        events = 0
        for trials in range(1, 401):
            events += rng.random() < 0.2
            if trials % 10 == 0:
                low, high = rate_interval(events, trials, 0.1)
                if not low <= 0.2 <= high:
                    misses += 1
                    break
    assert misses <= 0.1 * 100


def test_bounds_of_a_median() -> None:
    histogram = {3: 100, 5: 1000, 9: 100}
    assert quantile_bounds(histogram, 0.5, 0.01) == (5, 5)
    assert quantile_bounds({0: 500, 8: 500}, 0.5, 0.01) == (0, 8)
    assert quantile_bounds({}, 0.5, 0.01) == (None, None)
    assert quantile_bounds({4: 2}, 0.5, 0.01) == (None, None)


def test_of_yes_or_no_the_bound_is_clopper_and_pearsons() -> None:
    """Against scipy.stats.binomtest(k, n).proportion_ci(0.98, "exact").low."""
    for wins, num, exact in ((60, 60, 0.92611), (180, 200, 0.84011), (50, 100, 0.38094)):
        values = [1.0] * wins + [0.0] * (num - wins)
        assert lower_bound(values, 0.0, 0.01)[0] == pytest.approx(exact, abs=0.006)


def test_the_smallest_drop_is_found_as_often_as_the_power_says() -> None:
    rng, num, found = random.Random(3), 300, 0
    sample = [rng.gauss(0.0, 0.2) for _ in range(200)]
    drop = mean_interval(sample, worst=-1, best=1, alpha=0.01, power=0.9).smallest_drop
    for _ in range(num):
        values = [rng.gauss(-drop, 0.2) for _ in range(200)]
        found += mean_interval(values, worst=-1, best=1, alpha=0.01, power=0.9).high < 0
    assert 0.85 <= found / num <= 0.98
