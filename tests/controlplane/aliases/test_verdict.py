"""The judgement of canaries: simulated canaries, good and bad, and what it says of them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter

import pytest

from controlplane.aliases.verdict import (
    FIRST_TOKEN_UNIT_MS,
    LATENCIES,
    MAX_BUCKET,
    RATES,
    TOKEN_UNIT_MS,
    Counts,
    Guard,
    bucket_end_ms,
    bucket_of,
    problems,
)

GUARD = Guard()


@dataclasses.dataclass
class Traffic:
    """Requests that are shared out by chance; each breaks its schema at its target's rate."""

    share: float
    primary_rate: float
    canary_rate: float
    slower: float = 1.0

    def run(self, rng: random.Random, most: int, *, look_each: int = 5) -> int | None:
        """Look at each few of the canary's requests. -> at which it was rolled back."""
        primary, canary = Counts(), Counts()
        while canary.requests < most:
            is_canary = rng.random() < self.share
            counts = canary if is_canary else primary
            counts.requests += 1
            counts.checked += 1
            counts.broken += rng.random() < (self.canary_rate if is_canary else self.primary_rate)
            ms = 150 * math.exp(rng.gauss(0, 0.5)) * (self.slower if is_canary else 1)
            bucket = bucket_of(ms, FIRST_TOKEN_UNIT_MS)
            counts.first_token[bucket] = counts.first_token.get(bucket, 0) + 1
            if is_canary and not canary.requests % look_each and problems(canary, primary, GUARD):
                return canary.requests
        return None


@pytest.mark.parametrize(
    ("share", "primary_rate", "worse", "least"),
    [
        (0.1, 0.01, 0.20, 0.95),
        (0.1, 0.05, 0.30, 0.99),
        (0.5, 0.01, 0.20, 0.90),
        (0.5, 0.05, 0.30, 0.99),
    ],
)
def test_a_bad_canary_is_found_within_200_of_its_requests(
    share: float, primary_rate: float, worse: float, least: float
) -> None:
    rng = random.Random(18)
    traffic = Traffic(share, primary_rate, primary_rate + worse)
    found = [traffic.run(rng, 200) for _ in range(100)]
    assert sum(at is not None for at in found) >= least * len(found) - 1, found


def test_a_slow_canary_is_found() -> None:
    rng = random.Random(18)
    found = [Traffic(0.1, 0.01, 0.01, slower=3).run(rng, 400) for _ in range(10)]
    assert all(found), found


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.3])
def test_a_good_canary_stays(rate: float) -> None:
    rng = random.Random(18)
    assert [Traffic(0.1, rate, rate).run(rng, 400, look_each=20) for _ in range(20)] == [None] * 20


@pytest.mark.long
@pytest.mark.parametrize("rate", [0.0, 0.005, 0.05, 0.3])
def test_good_canaries_stay_through_thousands_of_requests(rate: float) -> None:
    """At a rate of one false alarm in a hundred, twelve of 500 would be one too many."""
    rng = random.Random(18)
    found = [Traffic(0.2, rate, rate).run(rng, 2000, look_each=10) for _ in range(500)]
    assert sum(at is not None for at in found) <= 12, found


def test_buckets_hold_their_times() -> None:
    for unit_ms in (FIRST_TOKEN_UNIT_MS, TOKEN_UNIT_MS):
        for ms in (0.0, 0.05, 1.0, 1.01, 7.7, 180.0, 9_000.0):
            bucket = bucket_of(ms, unit_ms)
            assert ms <= bucket_end_ms(bucket, unit_ms) * (1 + 1e-9)
            assert bucket == 0 or ms > bucket_end_ms(bucket - 1, unit_ms) * (1 - 1e-9)
    assert bucket_of(1e12, TOKEN_UNIT_MS) == MAX_BUCKET


def test_it_says_why() -> None:
    canary = Counts(requests=150, checked=150, broken=21)
    primary = Counts(requests=1480, checked=1480, broken=12)
    assert problems(canary, primary, GUARD) == [
        "schema failures 14.0 % of 150 checked requests against 0.8 % of 1,480; "
        "threshold: 2 points worse with 99 % confidence"
    ]


def test_it_says_why_of_latency() -> None:
    slow, fast = Counter({bucket_of(900, 1): 300}), Counter({bucket_of(100, 1): 3000})
    canary, primary = Counts(requests=300, first_token=slow), Counts(requests=3000)
    assert problems(canary, primary, GUARD) == []  # nothing to compare with
    primary.first_token = fast
    assert problems(canary, primary, GUARD) == [
        "time to the first token: the median is at least 861 ms against at most 108 ms; "
        "threshold: 1.5 times and 50 ms more with 99 % confidence"
    ]
    quicker = Counts(requests=300, first_token=Counter({bucket_of(8, 1): 300}))
    fastest = Counts(requests=300, first_token=Counter({0: 3000}))
    assert problems(quicker, fastest, GUARD) == []  # 8 times, but 7 ms


def test_the_guard_decides_what_is_judged() -> None:
    canary = Counts(requests=40, errors=40, truncated=40)
    primary = Counts(requests=1000)
    assert problems(canary, primary, GUARD) == []  # too small a sample
    larger = canary + canary
    assert len(problems(larger, primary, GUARD)) == 2
    calm = dataclasses.replace(GUARD, errors_points=None)
    assert [text.split()[0] for text in problems(larger, primary, calm)] == ["truncations"]
    assert problems(larger, primary, dataclasses.replace(GUARD, is_on=False)) == []
    assert calm.risk > GUARD.risk  # what is not watched takes no share


def test_counts_add_up_and_survive_json() -> None:
    one = Counts(requests=2, errors=1, first_token={3: 1, 4: 1})
    two = Counts(requests=5, truncated=2, first_token={4: 2}, token={9: 1})
    both = one + two
    assert both == Counts(requests=7, errors=1, truncated=2, first_token={3: 1, 4: 3}, token={9: 1})
    stored = {
        name: {str(k): v for k, v in value.items()} if isinstance(value, dict) else value
        for name, value in both.to_dict().items()
    }
    assert Counts.from_dict(stored) == both
    assert RATES[0].of(both, 0.01).value == 1 / 7
    assert LATENCIES[0].of(Counts(), 0.01) == (None, None)
