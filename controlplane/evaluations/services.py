"""Begin, cancel and delete evaluations of the tenant in scope, as callers ask for them."""

from __future__ import annotations

import datetime as dt
import logging
import uuid

from celery import current_app
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone
from kombu.exceptions import OperationalError

from controlplane.adapters.models import Adapter
from controlplane.errors import Conflict, InvalidRequest, RateLimited, require
from controlplane.evaluations import asking
from controlplane.evaluations.models import Evaluation, Result, SuiteVersion
from controlplane.evaluations.suites import may_read
from controlplane.events.audit.services import record
from controlplane.infra.locks import lock_until_commit
from controlplane.tenancy.scoping import current_tenant_id
from controlplane.tenants.auth import Permission, Principal, authorize
from controlplane.tenants.models import User

log = logging.getLogger(__name__)

RUN_TASK = "controlplane.evaluations.tasks.evaluation_run"
JUDGE_TASK = "controlplane.evaluations.tasks.evaluation_judge"
#: Largest numbers of a tenant's evaluations: unfinished ones, and all; the oldest go.
MAX_ACTIVE = 10
MAX_KEPT = 300
MAX_TOKENS = 4096
MAX_SEED = 2**31 - 1
#: A message that did not lead to work within this time is sent again.
QUEUE_LEASE = dt.timedelta(minutes=2)

Status = Evaluation.Status


def evaluation_get(*, evaluation_id: uuid.UUID, param: str | None = None) -> Evaluation:
    """Return an evaluation with its suite. Raises NotFound."""
    rows = Evaluation.objects.allowed().select_related("suite_version__suite")
    found = rows.filter(pk=evaluation_id).first()
    return require(found, "There is no such evaluation.", param=param)


def results_of(evaluation: Evaluation, *, by: Principal) -> QuerySet[Result]:
    """Return an evaluation's results. Raises PermissionDenied for words that `by` may not read."""
    if not may_read(evaluation.suite_version, by):
        authorize(by, Permission.REQUESTS_CONTENT)
    return Result.objects.allowed().filter(evaluation=evaluation).select_related("case")


def evaluation_create(
    *,
    principal: Principal,
    model: str,
    suite_version: SuiteVersion,
    max_tokens: int = 256,
    seed: int = 0,
    created_by: User | None = None,
    scored_in: uuid.UUID | None = None,
) -> Evaluation:
    """Have a suite's version run on a model: a version, alias or base model.

    scored_in  the `BatchScores` that have the log-probabilities; None: workers are asked for them
    Raises ApiError: what the model's name may raise, InvalidRequest, RateLimited for too many.
    """
    if not 1 <= max_tokens <= MAX_TOKENS:
        raise InvalidRequest(f"It is from 1 to {MAX_TOKENS}.", param="max_tokens")
    if not 0 <= seed <= MAX_SEED:
        raise InvalidRequest(f"It is from 0 to {MAX_SEED}.", param="seed")
    served = asking.caller_of(principal, model).model
    adapter = served.parts[0][0].adapter if served.parts else None
    with transaction.atomic():
        lock_until_commit(f"evaluations {current_tenant_id()}")
        if Evaluation.objects.filter(status__in=Evaluation.ACTIVE).count() >= MAX_ACTIVE:
            raise RateLimited(
                f"A tenant can have {MAX_ACTIVE} unfinished evaluations: cancel one, or wait.",
                code="too_many_evaluations",
                retry_after_s=60,
            )
        _forget_old()
        evaluation = Evaluation.objects.create(
            suite_version=suite_version,
            model=model,
            served=asking.served_name(served)[:1000],
            adapter=None if adapter is None else Adapter.objects.get(pk=adapter.pk),
            max_tokens=max_tokens,
            seed=seed,
            created_by=created_by,
            scored_in=scored_in,
            lease_until=timezone.now() + QUEUE_LEASE,
        )
        after = {"model": model, "suite": str(suite_version)}
        record("created", evaluation, after=after)
        transaction.on_commit(lambda: evaluation_send(evaluation))
    return evaluation


def _forget_old() -> None:
    ended = Evaluation.objects.exclude(status__in=Evaluation.ACTIVE).order_by("-created_at")
    old = list(ended.values_list("pk", flat=True)[MAX_KEPT - 1 : MAX_KEPT + 99])
    if old:
        Evaluation.objects.filter(pk__in=old).delete()


def evaluation_send(evaluation: Evaluation) -> None:
    """Tell a process that there is work; if the broker is down, the sweep does."""
    is_judged = evaluation.status == Status.JUDGING
    task, queue = (JUDGE_TASK, "ops") if is_judged else (RUN_TASK, "inspect")
    try:
        current_app.send_task(task, (), queue=queue)
    except OperationalError as error:
        log.warning("an evaluation waits for the sweep: %r", error)


@transaction.atomic
def evaluation_cancel(*, evaluation: Evaluation) -> Evaluation:
    """Cancel an evaluation; its running requests end within seconds. Results so far stay.

    Doing it again changes nothing. Raises Conflict when it has ended.
    """
    active = Evaluation.objects.filter(pk=evaluation.pk, status__in=Evaluation.ACTIVE)
    now = timezone.now()
    if active.update(status=Status.CANCELLED, finished_at=now, lease_until=None):
        record("cancelled", evaluation)
    evaluation.refresh_from_db()
    if evaluation.status != Status.CANCELLED:
        raise Conflict(
            f"The evaluation has ended already: it is {evaluation.status}.", code="evaluation_ended"
        )
    return evaluation


@transaction.atomic
def evaluation_delete(*, evaluation: Evaluation) -> None:
    """Delete an evaluation with its results; a running one stops. A gate's decision stays."""
    before = {"model": evaluation.model, "status": evaluation.status}
    record("deleted", evaluation, before=before)
    evaluation.delete()
