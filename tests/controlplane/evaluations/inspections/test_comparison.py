"""What a probe finds, and what it takes for numerics."""

from __future__ import annotations

import math
import random

import pytest

from controlplane.evaluations.inspections.comparison import (
    BF16,
    FP32,
    Scores,
    Tolerance,
    Verdict,
    compare,
    copy_nats,
    tolerance_for,
)

Values = list[list[float]]


def scores(values: Values) -> Scores:
    return Scores(logprobs=values, top=[{7: prompt[-1]} for prompt in values])


def noisy(values: Values, sigma: float, seed: int) -> Values:
    noise = random.Random(seed)
    return [[value + noise.gauss(0, sigma) for value in prompt] for prompt in values]


def made(seed: int = 0, effect: float = 0.9) -> tuple[Values, Values]:
    """Log-probabilities of four prompts by the base and with an adapter of this effect."""
    noise = random.Random(seed)
    base = [[noise.uniform(-8, 0) for _ in range(24)] for _ in range(4)]
    return base, noisy(base, effect, seed + 100)


def scaled(base: Values, adapter: Values, factor: float) -> Values:
    return [
        [b + factor * (a - b) for a, b in zip(own, of_base, strict=True)]
        for own, of_base in zip(adapter, base, strict=True)
    ]


def probe(
    base: Values, adapter: Values, served: Values, *, sigma: float, tolerance: Tolerance
) -> Verdict:
    return compare(
        reference=scores(adapter),
        served=scores(noisy(served, sigma, 1)),
        base_reference=scores(base),
        base_served=scores(noisy(base, sigma, 2)),
        tolerance=tolerance,
    )


@pytest.mark.parametrize(("sigma", "tolerance"), [(0.0005, FP32), (0.08, BF16)])
@pytest.mark.parametrize("effect", [0.0, 0.001, 0.05, 0.9])
def test_numerics_agree(sigma: float, tolerance: Tolerance, effect: float) -> None:
    for seed in range(50):
        base, adapter = made(seed, effect)
        verdict = probe(base, adapter, adapter, sigma=sigma, tolerance=tolerance)
        assert (verdict.problem, verdict.base_problem) == ("", ""), verdict


@pytest.mark.parametrize(("sigma", "tolerance"), [(0.0005, FP32), (0.08, BF16)])
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0, -1.0])
def test_a_wrong_scale_is_found(sigma: float, tolerance: Tolerance, factor: float) -> None:
    """Also in bf16, and also where no single value is off by more than the tolerance."""
    for seed in range(20):
        base, adapter = made(seed, effect=0.3)
        wrong = scaled(base, adapter, factor)
        verdict = probe(base, adapter, wrong, sigma=sigma, tolerance=tolerance)
        assert verdict.problem, verdict
        assert not verdict.base_problem


def test_the_reason_names_prompt_position_and_both_values() -> None:
    base, adapter = made()
    served = [list(prompt) for prompt in adapter]
    adapter[2][4], served[2][4] = -1.25, -3.5
    verdict = probe(base, adapter, served, sigma=0.0, tolerance=FP32)
    assert verdict.problem == (
        "prompt 3, position 5: the log-probability is -1.2500 by PEFT and -3.5000 on the worker"
    )


def test_nan_is_a_difference() -> None:
    base, adapter = made()
    served = [list(prompt) for prompt in adapter]
    served[0][0] = float("nan")
    verdict = probe(base, adapter, served, sigma=0.0, tolerance=BF16)
    assert verdict.problem.startswith("prompt 1, position 1")


def test_another_base_is_not_the_adapters_fault() -> None:
    base, adapter = made()
    verdict = compare(
        reference=scores(adapter),
        served=scores(adapter),
        base_reference=scores(base),
        base_served=scores(made(seed=9)[0]),
        tolerance=BF16,
    )
    assert verdict.base_problem and not verdict.problem.startswith("prompt")


def moved(given: Scores, change: float) -> Scores:
    """Scores as a quantised base has them: each second one lower by `change`."""
    return Scores(
        logprobs=[
            [value - change * (place % 2) for place, value in enumerate(prompt)]
            for prompt in given.logprobs
        ],
        top=given.top,
    )


def test_a_quantised_base_widens_the_tolerance() -> None:
    base, adapter = made(seed=1)

    def judge(with_adapter: Scores, without: Scores, *, is_quantized: bool = True) -> Verdict:
        return compare(
            reference=scores(adapter),
            served=with_adapter,
            base_reference=scores(base),
            base_served=without,
            tolerance=FP32,
            is_quantized=is_quantized,
        )

    near = judge(moved(scores(adapter), 0.4), moved(scores(base), 0.3))
    assert not near.problem and not near.base_problem
    assert near.nats == pytest.approx(0.2, abs=0.05)
    assert near.base_nats == pytest.approx(0.15, abs=0.04)
    assert judge(moved(scores(adapter), 0.4), moved(scores(base), 0.3), is_quantized=False).problem
    far = judge(moved(scores(adapter), 3.0), moved(scores(base), 0.3))
    assert far.problem.startswith("prompt")
    assert "nats less likely" in judge(scores(adapter), moved(scores(base), 4.0)).base_problem


def test_a_copy_is_judged_by_what_it_adds_to_the_distance() -> None:
    """Changes of both signs do not make up for each other; noise that both have does not count."""
    _, adapter = made(seed=1)
    exact = scores(adapter)
    assert copy_nats(exact, exact, moved(exact, 0.25)) == pytest.approx(0.125)
    both_ways = scores([[v + (-0.5) ** (1 + i % 2) for i, v in enumerate(p)] for p in adapter])
    assert copy_nats(exact, exact, both_ways) == pytest.approx(0.375)
    assert copy_nats(exact, both_ways, exact) == pytest.approx(-0.375)
    first, second = (scores(noisy(adapter, 0.2, seed)) for seed in (1, 2))
    assert abs(copy_nats(exact, first, second)) < 0.05
    assert copy_nats(exact, exact, moved(exact, math.nan)) == 1e6


def test_the_widest_dtype_decides() -> None:
    assert tolerance_for("float32", "float32") is FP32
    assert tolerance_for("float32", "bfloat16") is BF16
