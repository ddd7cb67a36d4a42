"""Judge a canary by its counts and the primary's. Pure: no database, no clock.

The canary is worse if one measure of it exceeds the primary's by more than the guard allows, at
the guard's confidence. That confidence is of all measures and all moments together (`statistics`):
a canary that is as good as the primary is rolled back in one of a hundred revisions at most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

from controlplane.infra.statistics import log_evidence, quantile_bounds, rate_interval

#: Number of buckets of latency: four per doubling.
_PER_DOUBLING = 4
#: So the last bucket begins after 110 s, or 11 s per token.
MAX_BUCKET = 67
#: Upper end of the first bucket, in ms.
FIRST_TOKEN_UNIT_MS, TOKEN_UNIT_MS = 1.0, 0.1
#: Difference in ms that never counts as worse, whatever the factor.
FIRST_TOKEN_SLACK_MS, TOKEN_SLACK_MS = 50.0, 5.0
_MEDIAN = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The limits at which a canary is rolled back by itself. `BOUNDS` has the allowed values.

    min_requests          the canary's requests before anything is judged
    confidence            of the whole judgement
    errors_points         percentage points of requests that failed by the model's or our fault
    schema_points         … of answers that break their schema
    truncations_points    … of requests whose answer was cut at its maximal length
    first_token_factor    of the median time from the turn to the first token
    token_factor          of the median time of each further token
    """

    is_on: bool = True
    min_requests: int = 50
    confidence: float = 0.99
    errors_points: float | None = 2.0
    schema_points: float | None = 2.0
    truncations_points: float | None = 5.0
    first_token_factor: float | None = 1.5
    token_factor: float | None = 1.5

    @property
    def risk(self) -> float:
        """Return the risk of error of each measure: they share the guard's."""
        return (1 - self.confidence) / max(1, sum(measure.allowed(self) for measure in MEASURES))


#: Field -> least and greatest value. Measures may also be None: they are not watched.
BOUNDS: dict[str, tuple[float, float]] = {
    "min_requests": (10, 100_000),
    "confidence": (0.9, 0.9999),
    "errors_points": (0, 50),
    "schema_points": (0, 50),
    "truncations_points": (0, 50),
    "first_token_factor": (1, 10),
    "token_factor": (1, 10),
}


@dataclasses.dataclass(slots=True)
class Counts:
    """Counts of one target, without requests that their client ended.

    checked      requests with an answer that was checked against a schema; `broken` broke it
    first_token  bucket -> requests; see `bucket_of`
    """

    requests: int = 0
    errors: int = 0
    checked: int = 0
    broken: int = 0
    truncated: int = 0
    first_token: dict[int, int] = dataclasses.field(default_factory=dict)
    token: dict[int, int] = dataclasses.field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = self.to_dict(), other.to_dict()
        return Counts(**{name: _sum(value, theirs[name]) for name, value in mine.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        def read(value: Any) -> Any:
            return {int(k): v for k, v in value.items()} if isinstance(value, dict) else value

        return cls(**{name: read(value) for name, value in fields.items()})


def _sum(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, dict):
        return {key: mine.get(key, 0) + theirs.get(key, 0) for key in sorted(mine | theirs)}
    return mine + theirs


def bucket_of(ms: float, unit_ms: float) -> int:
    """Return the number of the bucket of a time."""
    if ms <= unit_ms:
        return 0
    return min(MAX_BUCKET, math.ceil(_PER_DOUBLING * math.log2(ms / unit_ms)))


def bucket_end_ms(bucket: int, unit_ms: float) -> float:
    """Return the greatest time in a bucket."""
    return float(unit_ms * 2 ** (bucket / _PER_DOUBLING))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate with the bounds that hold at all moments, as shares of 1."""

    events: int
    trials: int
    low: float
    high: float

    @property
    def value(self) -> float | None:
        return self.events / self.trials if self.trials else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    name: str
    label: str
    guard_field: str

    def allowed(self, guard: Guard) -> bool:
        return getattr(guard, self.guard_field) is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RateMeasure(_Measure):
    """A share of requests that may not be greater with the canary."""

    events: str
    trials: str
    unit: str

    def of(self, counts: Counts, risk: float) -> Rate:
        events, trials = self._pair(counts)
        low, high = rate_interval(events, trials, risk)
        return Rate(events=events, trials=trials, low=low, high=high)

    def problem(self, canary: Counts, primary: Counts, guard: Guard) -> str | None:
        """Return why the canary is worse; None: nothing shows that."""
        points = getattr(guard, self.guard_field)
        mine, theirs = self._pair(canary), self._pair(primary)
        if log_evidence(mine, theirs, points / 100) < math.log(1 / guard.risk):
            return None
        threshold = f"{points:g} points worse" if points else "worse"
        return (
            f"{self.label} {_percent(mine)} of {mine[1]:,} {self.unit} against {_percent(theirs)} "
            f"of {theirs[1]:,}; threshold: {threshold} with {_confidence(guard)} confidence"
        )

    def _pair(self, counts: Counts) -> tuple[int, int]:
        return getattr(counts, self.events), getattr(counts, self.trials)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatencyMeasure(_Measure):
    """A median time that may not be greater with the canary."""

    histogram: str
    unit_ms: float
    slack_ms: float

    def of(self, counts: Counts, risk: float) -> tuple[float | None, float | None]:
        """Return the bounds of the median, in ms."""
        first, last = quantile_bounds(getattr(counts, self.histogram), _MEDIAN, risk)
        # A bucket begins where the one before ends.
        low = None if not first else bucket_end_ms(first - 1, self.unit_ms)
        return low, None if last is None else bucket_end_ms(last, self.unit_ms)

    def problem(self, canary: Counts, primary: Counts, guard: Guard) -> str | None:
        """Return why the canary is worse; None: nothing shows that."""
        factor = getattr(guard, self.guard_field)
        least, _ = self.of(canary, guard.risk / 2)
        _, most = self.of(primary, guard.risk / 2)
        if least is None or most is None or least <= most * factor + self.slack_ms:
            return None
        return (
            f"{self.label}: the median is at least {least:,.3g} ms against at most {most:,.3g} ms; "
            f"threshold: {factor:g} times and {self.slack_ms:g} ms more "
            f"with {_confidence(guard)} confidence"
        )


RATES = (
    RateMeasure(
        name="errors",
        label="errors",
        events="errors",
        trials="requests",
        unit="requests",
        guard_field="errors_points",
    ),
    RateMeasure(
        name="schema_failures",
        label="schema failures",
        events="broken",
        trials="checked",
        unit="checked requests",
        guard_field="schema_points",
    ),
    RateMeasure(
        name="truncations",
        label="truncations",
        events="truncated",
        trials="requests",
        unit="requests",
        guard_field="truncations_points",
    ),
)
LATENCIES = (
    LatencyMeasure(
        name="first_token_ms",
        label="time to the first token",
        histogram="first_token",
        unit_ms=FIRST_TOKEN_UNIT_MS,
        slack_ms=FIRST_TOKEN_SLACK_MS,
        guard_field="first_token_factor",
    ),
    LatencyMeasure(
        name="token_ms",
        label="time per token",
        histogram="token",
        unit_ms=TOKEN_UNIT_MS,
        slack_ms=TOKEN_SLACK_MS,
        guard_field="token_factor",
    ),
)
MEASURES: tuple[RateMeasure | LatencyMeasure, ...] = (*RATES, *LATENCIES)


def problems(canary: Counts, primary: Counts, guard: Guard) -> list[str]:
    """Return why a canary must be rolled back; empty: keep it."""
    if not guard.is_on or canary.requests < guard.min_requests:
        return []
    found = (
        measure.problem(canary, primary, guard) for measure in MEASURES if measure.allowed(guard)
    )
    return [problem for problem in found if problem is not None]


def _percent(pair: tuple[int, int]) -> str:
    return f"{pair[0] / pair[1]:.1%}".replace("%", " %")


def _confidence(guard: Guard) -> str:
    return f"{guard.confidence * 100:g} %"
