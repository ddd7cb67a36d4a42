"""Statistics of canaries, which are watched all the time, and of the gate, which looks once. Pure.

Rates of canaries: whoever looks after each request and stops at the first difference finds one
sooner or later, also where there is none. `log_evidence`, `rate_interval` and `quantile_bounds`
hold at every moment at once, however often one looks: a mixture of likelihoods, divided by the
likelihood of any hypothesis, is a martingale if the hypothesis is true, and passes 1/risk with a
probability of at most `risk` (Ville). Sources: Lindon and Malek, "Anytime-Valid Inference for
Multinomial Count Data", NeurIPS 2022 (arXiv 2011.03567), who watch canaries with it; Waudby-Smith
and Ramdas, "Confidence sequences for sampling without replacement", NeurIPS 2020, for the ratio of
prior and posterior; Wasserman, Ramdas and Balakrishnan, "Universal inference", PNAS 2020, for
hypotheses of many points: the smallest ratio over all of them counts; Howard and Ramdas,
"Sequential estimation of quantiles", Bernoulli 2022, for quantiles.

Means of the gate: a fixed number of paired differences, few and skewed. A bound that may be looked
at again and again would need more cases. `lower_bound` is a quantile of the Bayesian bootstrap of
the values and of the worst value that is possible. For yes-or-no values this is Clopper and
Pearson's exact bound, for others Gaffke's ("Three test statistics for a nonparametric one-sided
hypothesis on the mean of a nonnegative variable", 2005). So a list of equal values has no interval
of width 0: fifty cases without a difference do not show that there is none. The quantile is
computed from the first three moments of the Dirichlet weights (Cornish and Fisher), without random
draws, so equal values give equal bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

#: Parameter of the mixture Beta(0.5, 0.5), which is also good for rates near 0.
_PRIOR = 0.5
_STEPS = 40
_NORMAL = NormalDist()


def log_evidence(worse: tuple[int, int], reference: tuple[int, int], margin: float) -> float:
    """Return the log of the evidence that one rate exceeds the other by more than `margin`.

    If it does not, the evidence exceeds 1/risk at some moment with a probability of at most `risk`.

    worse, reference  (events, trials) of each
    """
    (k1, n1), (k0, n0) = worse, reference
    if not n1 or not n0 or k1 / n1 <= k0 / n0 + margin:
        return -math.inf

    def is_less_likely_above(rate: float) -> bool:
        above = rate + margin
        rest = (n1 - k1) / (1 - above) if n1 > k1 else 0.0  # rounded, 1 - above may be 0
        return k0 / rate + k1 / above < (n0 - k0) / (1 - rate) + rest

    # The best point of the hypothesis is on its edge, between the two observed rates.
    best = _bisect(k0 / n0, min(k1 / n1 - margin, 1 - margin), is_less_likely_above)
    mixed = _log_mixture(k1, n1) + _log_mixture(k0, n0)
    return mixed - _log_likelihood(k0, n0, best) - _log_likelihood(k1, n1, best + margin)


def rate_interval(events: int, trials: int, risk: float) -> tuple[float, float]:
    """Return bounds that hold the true rate at all moments together, but for `risk`."""
    if not trials:
        return 0.0, 1.0

    def is_inside(rate: float) -> bool:
        return not _is_excluded(rate, events, trials, risk)

    low = _bisect(0.0, events / trials, is_inside) if events else 0.0
    return low, _bisect(1.0, events / trials, is_inside) if events < trials else 1.0


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


def _bisect(near: float, far: float, is_past: Callable[[float], bool]) -> float:
    """Return the value between `near` and `far` where `is_past` begins to hold, by `near`."""
    for _ in range(_STEPS):
        middle = (near + far) / 2
        near, far = (near, middle) if is_past(middle) else (middle, far)
    return near


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The mean of `num` values, with a bound on each side, each with an error of `alpha`.

    smallest_drop  the minimum detectable effect: a true drop of this size is shown to be one with
                   the wanted power
    """

    num: int
    mean: float
    low: float
    high: float
    smallest_drop: float


def mean_interval(
    values: Sequence[float], *, worst: float, best: float, alpha: float, power: float
) -> Interval:
    """Return the interval of the mean of one or more values between `worst` and `best`."""
    mean = sum(values) / len(values)
    low, _ = lower_bound(values, worst, alpha)
    negative, error = lower_bound([-value for value in values], -best, alpha)
    return Interval(
        num=len(values),
        mean=mean,
        low=low,
        high=-negative,
        smallest_drop=(-negative - mean) + _NORMAL.inv_cdf(power) * error,
    )


def lower_bound(values: Sequence[float], worst: float, alpha: float) -> tuple[float, float]:
    """Return the bound and its standard error."""
    points = [*values, worst]
    num = len(points)
    mean = sum(points) / num
    deviations = [point - mean for point in points]
    variance = sum(d * d for d in deviations) / (num * (num + 1))
    if variance <= 0:
        return mean, 0.0
    third = 2 * sum(d * d * d for d in deviations) / (num * (num + 1) * (num + 2))
    # A long tail on the good side must not make the bound tighter.
    skew = max(-2.0, min(0.0, third / variance**1.5))
    z = _NORMAL.inv_cdf(alpha)
    error = math.sqrt(variance)
    return max(worst, mean + (z + skew * (z * z - 1) / 6) * error), error


def values_needed(found: Interval, drop: float, alpha: float, power: float) -> int:
    """Return the number of values that show that the mean does not fall by `drop`.

    It is the number for normal values with this spread; skewed ones need more.
    """
    z_alpha = _NORMAL.inv_cdf(alpha)
    error = (found.low - found.mean) / z_alpha
    return math.ceil(found.num * ((_NORMAL.inv_cdf(power) - z_alpha) * error / drop) ** 2)
