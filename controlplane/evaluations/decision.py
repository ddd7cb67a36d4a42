"""Decide whether a new version may go live, from its scores beside the live version's. Pure.

Both versions answered the same cases. Two things are compared: the checks' score, from 0 to 1, and
the log-probability of each token of the expected answers, in nats, cut at `MAX_NATS` a case. With
an interval for the mean difference (`statistics`):

- promote: both lower bounds are above the smallest drop that matters, and no slice is worse;
- reject:  one upper bound, of all cases or of a slice, is below 0, and the mean drop matters;
- hold:    anything else: the cases do not show which of the two is true.

Each of the two must pass at the full `alpha`, so a version whose true drop matters is promoted with
a probability of at most `alpha`. The slices share one `alpha`: they can only stop a version.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence

from controlplane.infra.statistics import Interval, mean_interval, values_needed

#: Largest weight of a case in nats, so that one unlikely token does not decide.
MAX_NATS = 1.0
#: Least number of cases for a decision.
MIN_CASES = 10
#: Least number of cases for a slice's own decision.
MIN_SLICE = 5


class Verdict(enum.StrEnum):
    PROMOTE = "promote"
    HOLD = "hold"
    REJECT = "reject"


class Metric(enum.StrEnum):
    SCORE = "score"
    LOGPROB = "logprob"

    @property
    def most(self) -> float:
        """Return the largest difference of a case that counts."""
        return MAX_NATS if self == Metric.LOGPROB else 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The differences that matter.

    score_drop    of the mean score, which is from 0 to 1
    logprob_drop  of the log-probability of a token, in nats: 0.1 is a perplexity of 10 % more
    slice_drop    of the mean score of one slice; of the log-probability twice as much
    alpha         the share of versions that are worse by a drop that matters and pass
    power         with which the smallest drop that could be seen is stated
    max_leaked    the share of the cases that may be among the rows of the training
    """

    score_drop: float = 0.05
    logprob_drop: float = 0.1
    slice_drop: float = 0.1
    alpha: float = 0.01
    power: float = 0.9
    max_leaked: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One case, by the new version and by the live one; None: it has no such score.

    logprob, live_logprob  for each token of the expected answer
    """

    slice: str = ""
    score: float | None = None
    live_score: float | None = None
    logprob: float | None = None
    live_logprob: float | None = None
    is_leaked: bool = False

    def of(self, metric: Metric) -> tuple[float | None, float | None]:
        """Return the new version's value and the live one's."""
        if metric == Metric.SCORE:
            return self.score, self.live_score
        return self.logprob, self.live_logprob


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one metric, for all cases or one slice."""

    metric: Metric
    slice: str
    interval: Interval
    drop: float

    @property
    def is_worse(self) -> bool:
        return self.interval.high < 0 and self.interval.mean <= -self.drop

    @property
    def is_as_good(self) -> bool:
        return self.interval.low >= -self.drop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`reasons` are sentences for people; the first one decides."""

    verdict: Verdict
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    num_cases: int
    num_leaked: int


def decide(pairs: Sequence[Pair], policy: Policy) -> Decision:
    """Return the decision on the new version, with its reasons."""
    kept = [pair for pair in pairs if not pair.is_leaked]
    num_leaked = len(pairs) - len(kept)
    findings = _findings(kept, policy)
    verdict, reasons = _judged(pairs, kept, findings, policy)
    if num_leaked:
        reasons.append(f"{_cases(num_leaked)} left out: their prompts are in the training's rows.")
    reasons += [_told(finding) for finding in findings if not finding.slice]
    return Decision(
        verdict=verdict,
        reasons=tuple(reasons),
        findings=tuple(findings),
        num_cases=len(kept),
        num_leaked=num_leaked,
    )


def _judged(
    pairs: Sequence[Pair], kept: Sequence[Pair], findings: Sequence[Finding], policy: Policy
) -> tuple[Verdict, list[str]]:
    num_leaked = len(pairs) - len(kept)
    if pairs and num_leaked > policy.max_leaked * len(pairs):
        share = f"{num_leaked} of {_cases(len(pairs))} are in the training's rows"
        return Verdict.HOLD, [f"{share}; at most {policy.max_leaked:.0%} may be."]
    whole = [finding for finding in findings if not finding.slice]
    if len(kept) < MIN_CASES or not whole:
        return Verdict.HOLD, [
            f"{_cases(len(kept))} could be compared; at least {MIN_CASES} are needed."
        ]
    worse = [finding for finding in findings if finding.is_worse]
    if worse:
        return Verdict.REJECT, [_worse(finding) for finding in worse]
    unclear = [finding for finding in whole if not finding.is_as_good]
    if unclear:
        return Verdict.HOLD, [_unclear(finding, policy) for finding in unclear]
    return Verdict.PROMOTE, ["It is as good as the live version, or better."]


def _findings(pairs: Sequence[Pair], policy: Policy) -> list[Finding]:
    found = [
        finding
        for metric, drop in (
            (Metric.SCORE, policy.score_drop),
            (Metric.LOGPROB, policy.logprob_drop),
        )
        if (finding := _finding(pairs, metric, "", drop, policy, policy.alpha))
    ]
    names = sorted({pair.slice for pair in pairs if pair.slice})
    parts = {name: [pair for pair in pairs if pair.slice == name] for name in names}
    parts = {name: part for name, part in parts.items() if len(part) >= MIN_SLICE}
    if not parts:
        return found
    alpha = policy.alpha / (2 * len(parts))
    for name, part in parts.items():
        for metric, drop in (
            (Metric.SCORE, policy.slice_drop),
            (Metric.LOGPROB, 2 * policy.logprob_drop),
        ):
            if finding := _finding(part, metric, name, drop, policy, alpha):
                found.append(finding)
    return found


def _finding(
    pairs: Sequence[Pair], metric: Metric, name: str, drop: float, policy: Policy, alpha: float
) -> Finding | None:
    found = interval(pairs, metric, alpha, policy.power)
    if found is None or found.num < (MIN_SLICE if name else MIN_CASES):
        return None
    return Finding(metric=metric, slice=name, interval=found, drop=drop)


def interval(pairs: Iterable[Pair], metric: Metric, alpha: float, power: float) -> Interval | None:
    """Return the interval of the new version's values less the live one's, of cases with both."""
    most, values = metric.most, []
    for pair in pairs:
        new, live = pair.of(metric)
        if new is not None and live is not None and not math.isnan(new - live):
            values.append(min(most, max(-most, new - live)))
    if not values:
        return None
    return mean_interval(values, worst=-most, best=most, alpha=alpha, power=power)


_CALLED = {
    Metric.SCORE: ("score", ""),
    Metric.LOGPROB: ("log-probability of a token", " nats"),
}


def _told(finding: Finding) -> str:
    name, unit = _CALLED[finding.metric]
    found = finding.interval
    return (
        f"The mean {name} changes by {found.mean:+.3f}{unit} (from {found.low:+.3f} to "
        f"{found.high:+.3f}, {_cases(found.num)}); the smallest drop that could be seen is "
        f"{found.smallest_drop:.3f}{unit}."
    )


def _worse(finding: Finding) -> str:
    name, unit = _CALLED[finding.metric]
    where = f" of the slice {finding.slice}" if finding.slice else ""
    found = finding.interval
    return (
        f"It is worse: the mean {name}{where} falls by {-found.mean:.3f}{unit}, by at least "
        f"{-found.high:.3f} ({_cases(found.num)})."
    )


def _unclear(finding: Finding, policy: Policy) -> str:
    name, unit = _CALLED[finding.metric]
    found = finding.interval
    needed = values_needed(found, finding.drop, policy.alpha, policy.power)
    more = f" About {needed} cases would show it." if needed > found.num else ""
    return (
        f"It is not shown that the mean {name} falls by less than {finding.drop:g}{unit}: it "
        f"may fall by {-found.low:.3f}.{more}"
    )


def _cases(number: int) -> str:
    return f"{number} case" if number == 1 else f"{number} cases"
