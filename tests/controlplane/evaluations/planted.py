"""Planted retrains: paired scores of a new version and of the live one, of a known kind.

Each case has a difficulty that both versions share, as real prompts do; each version adds noise of
its own. A score is right or wrong; a log-probability is of the expected answer's tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from controlplane.evaluations.decision import Pair

NUM_CASES = 400
SLICES = ("invoices", "orders", "refunds", "other")
KINDS = ("good", "shuffled", "slice", "stale", "leaked")
BAD = ("shuffled", "slice", "stale", "leaked")


def decisions_of(kind: str, seed: int, num_cases: int = NUM_CASES) -> list[Pair]:
    """Return the pairs of one retrain."""
    rng = random.Random(f"{kind} {seed}")
    gain = rng.uniform(0.0, 0.05)
    return [_KINDS[kind](rng, gain, number) for number in range(num_cases)]


def _pair(
    rng: random.Random, number: int, *, gain: float, harm: float = 0.0, is_leaked: bool = False
) -> Pair:
    """One case.

    gain  how many more answers are right
    harm  the share of answers that a broken version gets wrong besides
    """
    base = rng.betavariate(5, 1)
    live = rng.random() < base
    # Most answers of a retrain stay as they are; some change for better or worse.
    new = live
    if rng.random() < 0.04:
        new = rng.random() < base
    if not new and rng.random() < gain / 0.17:
        new = True
    if rng.random() < harm:
        new = rng.random() < 0.1
    logprob = -rng.expovariate(1 / 0.4)
    change = rng.gauss(gain / 2, 0.15) - harm * rng.uniform(0.2, 1.5)
    return Pair(
        slice=SLICES[number % len(SLICES)],
        score=float(new),
        live_score=float(live),
        logprob=logprob + change,
        live_logprob=logprob,
        is_leaked=is_leaked,
    )


def _good(rng: random.Random, gain: float, number: int) -> Pair:
    return _pair(rng, number, gain=gain)


def _shuffled(rng: random.Random, gain: float, number: int) -> Pair:
    return _pair(rng, number, gain=0.0, harm=0.8)


def _slice(rng: random.Random, gain: float, number: int) -> Pair:
    is_broken = number % len(SLICES) == 2
    return _pair(rng, number, gain=gain, harm=0.7 if is_broken else 0.0)


def _stale(rng: random.Random, gain: float, number: int) -> Pair:
    """The newer half of the rows was not learned."""
    return _pair(rng, number, gain=0.0, harm=0.3 if rng.random() < 0.5 else 0.0)


def _leaked(rng: random.Random, gain: float, number: int) -> Pair:
    """It knows the leaked rows by heart, and is worse on others; fewer than may be are known."""
    if rng.random() < 0.07:
        pair = _pair(rng, number, gain=1.0, is_leaked=True)
        return pair
    return _pair(rng, number, gain=0.0, harm=0.2)


_KINDS: dict[str, Callable[[random.Random, float, int], Pair]] = {
    "good": _good,
    "shuffled": _shuffled,
    "slice": _slice,
    "stale": _stale,
    "leaked": _leaked,
}
