"""Bounds of the mean of paired differences, for few and for skewed values. Pure functions.

The lower bound is a quantile of the Bayesian bootstrap of the values and of the worst value that
is possible. For yes-or-no values this is Clopper and Pearson's exact bound, for others Gaffke's
("Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
variable", 2005). So a list of equal values has no interval of width 0: fifty cases without a
difference do not show that there is none. The quantile is computed from the first three moments of
the Dirichlet weights (Cornish and Fisher), without random draws, so equal values give equal bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import NormalDist

_NORMAL = NormalDist()


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


def interval(
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
