"""Compare two rates again and again while the counts grow, without raising the risk of error.

Whoever looks after each request and stops at the first difference finds one sooner or later, also
where there is none. These tests hold at every moment at once, however often one looks: a mixture
of likelihoods, divided by the likelihood of any hypothesis, is a martingale if the hypothesis is
true, and passes 1/risk with a probability of at most `risk` (Ville). Pure functions.

Sources: Lindon and Malek, "Anytime-Valid Inference for Multinomial Count Data", NeurIPS 2022
(arXiv 2011.03567), who watch canaries with it; Waudby-Smith and Ramdas, "Confidence sequences for
sampling without replacement", NeurIPS 2020, for the ratio of prior and posterior; Wasserman,
Ramdas and Balakrishnan, "Universal inference", PNAS 2020, for hypotheses of many points: the
smallest ratio over all of them counts; Howard and Ramdas, "Sequential estimation of quantiles",
Bernoulli 2022, for quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

#: Parameter of the mixture Beta(0.5, 0.5), which is also good for rates near 0.
_PRIOR = 0.5
_STEPS = 40
_GOLDEN = (math.sqrt(5) - 1) / 2


def log_evidence(worse: tuple[int, int], reference: tuple[int, int], margin: float) -> float:
    """Return the log of the evidence that one rate exceeds the other by more than `margin`.

    If it does not, the evidence exceeds 1/risk at some moment with a probability of at most `risk`.

    worse, reference  (events, trials) of each
    """
    (k1, n1), (k0, n0) = worse, reference
    if not n1 or not n0 or k1 / n1 <= k0 / n0 + margin:
        return -math.inf
    mixed = _log_mixture(k1, n1) + _log_mixture(k0, n0)

    def evidence_against(rate: float) -> float:
        return mixed - _log_likelihood(k0, n0, rate) - _log_likelihood(k1, n1, rate + margin)

    # The best point of the hypothesis is on its edge, between the two observed rates.
    low, high = k0 / n0, min(k1 / n1 - margin, 1 - margin)
    for _ in range(_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if evidence_against(left) < evidence_against(right):
            high = right
        else:
            low = left
    return evidence_against((low + high) / 2)


def rate_interval(events: int, trials: int, risk: float) -> tuple[float, float]:
    """Return bounds that hold the true rate at all moments together, but for `risk`."""
    if not trials:
        return 0.0, 1.0

    def edge(outside: float) -> float:
        inside = events / trials
        for _ in range(_STEPS):
            middle = (outside + inside) / 2
            is_out = _is_excluded(middle, events, trials, risk)
            outside, inside = (middle, inside) if is_out else (outside, middle)
        return outside

    low = 0.0 if not events else edge(0.0)
    return low, 1.0 if events == trials else edge(1.0)


def quantile_bounds(
    histogram: Mapping[int, int], quantile: float, risk: float
) -> tuple[int | None, int | None]:
    """Return the bucket below which the quantile is not, and the one above which it is not.

    They hold at all moments together, but for `risk`. None: there is no such bound yet.

    histogram  bucket's number -> count
    """
    # One confidence interval of the share below the quantile bounds it from both sides,
    # whatever the number of buckets, so the risk is that of one interval.
    trials, below = sum(histogram.values()), 0
    first: int | None = None
    for bucket in sorted(histogram):
        if below < quantile * trials and _is_excluded(quantile, below, trials, risk):
            first = bucket
        below += histogram[bucket]
        if below > quantile * trials and _is_excluded(quantile, below, trials, risk):
            return first, bucket
    return first, None


def _is_excluded(rate: float, events: int, trials: int, risk: float) -> bool:
    mixed = _log_mixture(events, trials)
    return mixed - _log_likelihood(events, trials, rate) >= math.log(1 / risk)


def _log_mixture(events: int, trials: int) -> float:
    return _log_beta(_PRIOR + events, _PRIOR + trials - events) - _log_beta(_PRIOR, _PRIOR)


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log_likelihood(events: int, trials: int, rate: float) -> float:
    rest = trials - events
    if (events and rate <= 0) or (rest and rate >= 1):
        return -math.inf
    log = events * math.log(rate) if events else 0.0
    return log + (rest * math.log1p(-rate) if rest else 0.0)
