"""Compare two evaluations of one version of a suite, case by case."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from controlplane.errors import Conflict
from controlplane.evaluations.decision import Metric, Pair, interval
from controlplane.evaluations.models import Case, Evaluation, Result
from controlplane.evaluations.suites import may_read
from controlplane.infra.statistics import Interval
from controlplane.tenants.auth import Principal

#: Error of each side: both bounds together hold in 95 % of all comparisons.
ALPHA = 0.025
POWER = 0.9
#: Number of shown cases: those that changed most.
MAX_CHANGED = 20
_METHOD = (
    "Of the differences case by case: bounds of the Bayesian bootstrap with one more, worst case "
    "(Gaffke), each with 97.5 %; exact for yes-or-no scores"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The second evaluation less the first, of all cases (slice "") or of one slice."""

    metric: Metric
    slice: str
    before: float
    after: float
    interval: Interval


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One case and its two answers.

    is_scored_alike  whether one program computed both log-probabilities
    """

    case: Case
    before: Result
    after: Result
    is_scored_alike: bool = True

    @property
    def change(self) -> float:
        if self.before.score is not None and self.after.score is not None:
            return self.after.score - self.before.score
        return 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two evaluations; is_shown: whether `changed`, which has words, is."""

    before: Evaluation
    after: Evaluation
    num_cases: int
    num_better: int
    num_worse: int
    differences: tuple[Difference, ...]
    changed: tuple[Changed, ...]
    is_shown: bool
    method: str = _METHOD


def evaluations_compare(before: Evaluation, after: Evaluation, *, by: Principal) -> Comparison:
    """Return the differences, without the changed answers if `by` may not read them.

    Raises Conflict unless both have ended well, on the same cases.
    """
    if before.suite_version_id != after.suite_version_id:
        raise Conflict(
            "The evaluations ran different versions of a suite: choose two of one version.",
            code="suites_differ",
        )
    for evaluation in (before, after):
        if evaluation.status != Evaluation.Status.SUCCEEDED:
            raise Conflict(
                f"The evaluation {evaluation.pk} is {evaluation.status}.", code="not_succeeded"
            )
    both = paired(before, after)
    pairs = [pair_of(each) for each in both]
    slices = ["", *sorted({pair.slice for pair in pairs if pair.slice})]
    found = [
        difference
        for name in slices
        for metric in Metric
        if (difference := _difference(metric, name, pairs))
    ]
    changes = [each.change for each in both]
    is_shown = may_read(before.suite_version, by)
    return Comparison(
        before=before,
        after=after,
        num_cases=len(both),
        num_better=sum(change > 0 for change in changes),
        num_worse=sum(change < 0 for change in changes),
        differences=tuple(found),
        changed=tuple(_most_changed(both)) if is_shown else (),
        is_shown=is_shown,
    )


def paired(before: Evaluation, after: Evaluation) -> list[Changed]:
    """Return the cases that both have a result of, in the suite's order."""
    results = Result.objects.filter(evaluation=before).select_related("case")
    others = {row.case_id: row for row in Result.objects.filter(evaluation=after)}
    rows = results.order_by("case__position")
    is_alike = before.scored_in == after.scored_in
    return [
        Changed(case=row.case, before=row, after=others[row.case_id], is_scored_alike=is_alike)
        for row in rows
        if row.case_id in others
    ]


def pair_of(both: Changed, *, is_leaked: bool = False) -> Pair:
    """Return a case's scores: `after` is the new version, `before` the live one.

    Sums over different tokens are not compared, nor those that different programs computed.
    """
    is_same = both.is_scored_alike and both.after.num_tokens == both.before.num_tokens
    return Pair(
        slice=both.case.slice,
        score=both.after.score,
        live_score=both.before.score,
        logprob=_per_token(both.after) if is_same else None,
        live_logprob=_per_token(both.before) if is_same else None,
        is_leaked=is_leaked,
    )


def _per_token(result: Result) -> float | None:
    if result.logprob is None or not result.num_tokens:
        return None
    return result.logprob / result.num_tokens


def _difference(metric: Metric, name: str, pairs: Sequence[Pair]) -> Difference | None:
    rows = [pair for pair in pairs if not name or pair.slice == name]
    found = interval(rows, metric, ALPHA, POWER)
    if found is None:
        return None
    afters, befores = zip(*(pair.of(metric) for pair in rows), strict=True)
    return Difference(
        metric=metric, slice=name, before=_mean(befores), after=_mean(afters), interval=found
    )


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 0.0


def _most_changed(both: Sequence[Changed]) -> list[Changed]:
    differ = [each for each in both if each.before.output != each.after.output or each.change]
    differ.sort(key=lambda each: (-abs(each.change), each.case.position))
    return differ[:MAX_CHANGED]


def interval_json(found: Interval) -> dict[str, Any]:
    """Return an interval as the API shows it."""
    told = dataclasses.asdict(found)
    return {name: value if name == "num" else round(value, 6) for name, value in told.items()}
