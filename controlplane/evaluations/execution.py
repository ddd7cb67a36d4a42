"""Do the work of evaluations, in short turns.

A turn takes the next evaluation of the next tenant, under a lease with the number of its attempt,
and writes the results of a few cases at a time. A killed process loses only the cases that it was
asking: the next turn asks the cases without a result. Between turns the inspector does its other
work.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.db import connection, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from contract.training.judging import Score
from controlplane.errors import ApiError, NotFound
from controlplane.evaluations import asking, batch_scores, checks, services
from controlplane.evaluations.asking import Asked, Stopped
from controlplane.evaluations.batch_scores import ScoresGone
from controlplane.evaluations.judge import JudgeFailed, NoMark, mark
from controlplane.evaluations.models import Case, Evaluation, Judge, Result
from controlplane.events.audit.services import record
from controlplane.infra.metrics import EVALUATIONS_ENDED
from controlplane.infra.outages import DATABASE_OUTAGE
from controlplane.tenancy.row_lease import RowLease
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage.limits import turns
from controlplane.usage.limits.models import Turn

log = logging.getLogger(__name__)

Status = Evaluation.Status

#: Time after which a turn begins no more cases.
TURN_S = 15.0
JUDGE_TURN_S = 5.0
#: Number of cases whose results are written together.
CHUNK = 16
LEASE = dt.timedelta(seconds=90)
#: Time limit of a judge's answer, which delays the next case's result.
JUDGE_LEASE = dt.timedelta(minutes=5)
#: Number of turns in a row without an answer, with pauses up to five minutes.
MAX_FAILURES = 30
_PAUSE, _LONGEST_PAUSE = dt.timedelta(seconds=5), dt.timedelta(minutes=5)


class EvaluationLease(RowLease[Evaluation]):
    """A process's lease on its evaluation."""

    fence_field = "attempts"


class Failed(Exception):
    """The evaluation cannot continue; the message is for the tenant."""


def evaluate_next() -> bool:
    """Do a turn of the next evaluation. -> False when none waits."""
    return _turn_of_next((Status.QUEUED, Status.RUNNING), Status.RUNNING, LEASE)


def judge_next() -> bool:
    """Ask judges for marks, for a turn. -> False when no evaluation waits for them."""
    return _turn_of_next((Status.JUDGING,), Status.JUDGING, JUDGE_LEASE)


def _turn_of_next(before: Sequence[str], status: Status, lease: dt.timedelta) -> bool:
    evaluation = _claim(before, status, lease)
    if evaluation is None:
        return False
    with tenant_scope(evaluation.tenant_id):
        try:
            work = _judge if status == Status.JUDGING else _evaluate
            is_over = work(evaluation)
        except Stopped:
            return True
        except (Failed, ScoresGone, NotFound) as error:
            evaluation_end(evaluation, Status.FAILED, str(error))
        except ApiError as error:
            _put_off(evaluation, error.message)
        except DATABASE_OUTAGE:
            raise
        except Exception:
            log.exception("an evaluation failed", extra={"evaluation_id": str(evaluation.pk)})
            _put_off(evaluation, "The server failed on this evaluation: send the operator its id.")
        else:
            if not is_over:
                _pass_on(evaluation)
    return True


def claimable(statuses: Sequence[str]) -> QuerySet[Evaluation]:
    """Return the evaluations of the scope whose next turn may begin now."""
    is_free = Q(status=Status.QUEUED) | Q(lease_until=None) | Q(lease_until__lte=timezone.now())
    return Evaluation.objects.filter(is_free, status__in=statuses)


def lost(statuses: Sequence[str]) -> QuerySet[Evaluation]:
    """Return the due evaluations of the scope that no process works on."""
    rows = Evaluation.objects.filter(status__in=statuses, lease_until__lte=timezone.now())
    return rows.order_by("lease_until")


def _claim(before: Sequence[str], status: Status, lease: dt.timedelta) -> Evaluation | None:
    while True:
        with all_tenants(reason="the next evaluation is chosen among all tenants"):
            row = turns.next_of(Turn.Kind.EVALUATION, claimable(before))
        if row is None:
            return None
        with tenant_scope(row.tenant_id), transaction.atomic():
            unchanged = Evaluation.objects.filter(pk=row.pk, attempts=row.attempts)
            started = row.started_at or timezone.now()
            rows = unchanged.filter(status=row.status)
            if EvaluationLease.take(rows, lease, status=status, started_at=started):
                turns.taken(Turn.Kind.EVALUATION)
                related = ("suite_version__suite", "tenant")
                return Evaluation.objects.select_related(*related).get(pk=row.pk)


def _evaluate(evaluation: Evaluation) -> bool:
    """Do a turn. -> whether the evaluation is complete. Raises ApiError, Failed, Stopped."""
    caller = asking.caller_of(asking.principal_of(evaluation.tenant), evaluation.model)
    now_served = asking.served_name(caller.model)[:1000]
    if now_served != evaluation.served:
        raise Failed(f"{evaluation.model} meant {evaluation.served}; it is {now_served} now.")
    scored: dict[int, Score] = {}
    if evaluation.scored_in is not None:
        [(version, _)] = caller.model.parts
        scored = batch_scores.scores_for(evaluation, version.digest)
    lease, ends_at = EvaluationLease(evaluation), time.monotonic() + TURN_S

    def is_held() -> bool:
        try:
            with tenant_scope(evaluation.tenant_id):
                return lease.extend(lease.rows(Status.RUNNING), LEASE)
        finally:
            connection.close()  # the thread's own connection

    while time.monotonic() < ends_at:
        cases = list(_left(evaluation)[:CHUNK])
        if not cases:
            return _finish_asking(evaluation)
        answers = asking.ask(evaluation, caller, cases, is_held)
        if evaluation.scored_in is not None:
            answers = [_with_score(asked, scored) for asked in answers]
        _keep(evaluation, answers)
    return False


def _with_score(asked: Asked, scored: Mapping[int, Score]) -> Asked:
    """Add the batch's score as a worker's; a case whose request was refused has none."""
    logprob, num_tokens = scored.get(asked.case.position, (None, 0))
    if asked.error:
        logprob, num_tokens = None, 0
    return dataclasses.replace(asked, logprob=logprob, num_tokens=num_tokens)


def _left(evaluation: Evaluation) -> QuerySet[Case]:
    done = Result.objects.filter(evaluation=evaluation).values("case_id")
    cases = Case.objects.filter(suite_version=evaluation.suite_version).exclude(pk__in=done)
    return cases.order_by("position")


def _keep(evaluation: Evaluation, answers: Iterable[Asked]) -> None:
    """Score answers and write their results. Raises Stopped when the lease is lost."""
    rows = [_result(evaluation, asked) for asked in answers]
    with transaction.atomic():
        lease = EvaluationLease(evaluation)
        if not lease.rows(Status.RUNNING).select_for_update().exists():
            raise Stopped
        Result.objects.bulk_create(rows, ignore_conflicts=True)
        num_done = Result.objects.filter(evaluation=evaluation).count()
        lease.extend(lease.rows(Status.RUNNING), LEASE, num_done=num_done, failures=0)


def _result(evaluation: Evaluation, asked: Asked) -> Result:
    case = asked.case
    if asked.error:
        scores: list[float | None] = [0.0] * len(case.checks)
    else:
        scores = checks.scores(case.checks, asked.output, case.expected)
    return Result(
        evaluation=evaluation,
        case=case,
        output=asked.output,
        finish_reason=asked.finish_reason,
        error=asked.error,
        scores=scores,
        score=checks.mean_of(scores),
        logprob=asked.logprob,
        num_tokens=asked.num_tokens,
    )


def _finish_asking(evaluation: Evaluation) -> bool:
    unmarked = _unmarked(evaluation)
    if unmarked.exists():
        lease = EvaluationLease(evaluation)
        now = timezone.now()
        if lease.rows(Status.RUNNING).update(status=Status.JUDGING, lease_until=now):
            evaluation.status = Status.JUDGING
            services.evaluation_send(evaluation)
        return True
    evaluation_end(evaluation, Status.SUCCEEDED)
    return True


def _unmarked(evaluation: Evaluation) -> QuerySet[Result]:
    rows = Result.objects.filter(evaluation=evaluation, scores__contains=[None])
    return rows.select_related("case").order_by("case__position")


def _judge(evaluation: Evaluation) -> bool:
    lease, ends_at = EvaluationLease(evaluation), time.monotonic() + JUDGE_TURN_S
    judges = {judge.name: judge for judge in Judge.objects.all()}
    for result in _unmarked(evaluation)[:1000]:
        if time.monotonic() > ends_at:
            return False
        if not lease.extend(lease.rows(Status.JUDGING), JUDGE_LEASE):
            raise Stopped
        _mark(result, judges)
        Result.objects.filter(pk=result.pk).update(
            scores=result.scores, score=result.score, error=result.error
        )
        lease.rows(Status.JUDGING).update(failures=0)
    evaluation_end(evaluation, Status.SUCCEEDED)
    return True


def _mark(result: Result, judges: dict[str, Judge]) -> None:
    """Fill in a result's marks. Raises Failed, ApiError when a judge may answer later."""
    case = result.case
    for number, check in enumerate(case.checks):
        if result.scores[number] is not None:
            continue
        judge = judges.get(check["judge"])
        if judge is None:
            raise Failed(f"There is no judge {check['judge']}: make it, or change the suite.")
        try:
            result.scores[number] = mark(
                judge,
                rubric=check.get("rubric", ""),
                prompt=case.messages,
                expected=case.expected,
                output=result.output,
            )
        except NoMark as error:
            result.scores[number], result.error = 0.0, f"The judge {judge.name}: {error}"[:500]
        except JudgeFailed as error:
            message = f"The judge {judge.name} failed: {error}"
            if error.is_final:
                raise Failed(message) from error
            raise ApiError(message) from error
    result.score = checks.mean_of(result.scores)


def _pass_on(evaluation: Evaluation) -> None:
    """Let the next turn begin, in any process."""
    lease = EvaluationLease(evaluation)
    lease.rows(evaluation.status).update(lease_until=timezone.now())
    services.evaluation_send(evaluation)


def _put_off(evaluation: Evaluation, why: str) -> None:
    failures = evaluation.failures + 1
    if failures >= MAX_FAILURES:
        evaluation_end(evaluation, Status.FAILED, why)
        return
    wait = min(_LONGEST_PAUSE, _PAUSE * 2 ** min(failures - 1, 10))
    rows = EvaluationLease(evaluation).rows(evaluation.status)
    rows.update(lease_until=timezone.now() + wait, failures=failures, error=why[:1000])
    log.warning("an evaluation waits: %s", why, extra={"evaluation_id": str(evaluation.pk)})


def evaluation_end(evaluation: Evaluation, status: Status, error: str = "") -> None:
    """End an evaluation that this process has."""
    rows = EvaluationLease(evaluation).rows(*Evaluation.ACTIVE)
    with transaction.atomic():
        ended = rows.update(
            status=status,
            error=error[:1000],
            summary=summary_of(evaluation),
            finished_at=timezone.now(),
            lease_until=None,
        )
        if not ended:
            return
        after = {"status": status, "error": error[:1000]}
        record("ended", evaluation, after=after)
    EVALUATIONS_ENDED.labels(status.value).inc()
    extra = {"evaluation_id": str(evaluation.pk), "status": status.value}
    log.info("evaluation ended", extra=extra)


def summary_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return the means over an evaluation's results: of all cases, by slice and by check."""
    slices: dict[str, list[float]] = collections.defaultdict(list)
    by_check: dict[str, list[float]] = collections.defaultdict(list)
    every: list[float] = []
    logprob, num_tokens, num_errors = 0.0, 0, 0
    for result in Result.objects.filter(evaluation=evaluation).select_related("case"):
        num_errors += bool(result.error)
        if result.logprob is not None:
            logprob, num_tokens = logprob + result.logprob, num_tokens + result.num_tokens
        for check, score in zip(result.case.checks, result.scores, strict=True):
            if score is not None:
                by_check[check["type"]].append(score)
        if result.score is not None:
            every.append(result.score)
            slices[result.case.slice].append(result.score)
    return {
        "score": _mean(every),
        "logprob": logprob / num_tokens if num_tokens else None,
        "errors": num_errors,
        "checks": {name: _mean(values) for name, values in sorted(by_check.items())},
        "slices": {name: _mean(values) for name, values in sorted(slices.items()) if name},
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
