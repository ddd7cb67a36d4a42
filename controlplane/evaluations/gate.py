"""The gate: a new version is evaluated beside the live one, and the decision is carried out.

A training's version of an adapter with the policy `gate` gets a `GateDecision` as it becomes ready.
When both evaluations have ended, this module applies what `decision.decide` returns, once: the row
is moved by compare-and-set in the transaction of the promotion.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from celery import current_app
from django.db import transaction
from django.utils import timezone
from kombu.exceptions import OperationalError

from controlplane.adapters import promotion
from controlplane.adapters.models import Adapter, AdapterVersion, Promotion
from controlplane.aliases import services as aliases
from controlplane.aliases.contents import Contents, Part
from controlplane.aliases.models import Alias
from controlplane.errors import ApiError, Conflict, RateLimited, require
from controlplane.evaluations import asking, batch_scores, services
from controlplane.evaluations.comparison import Changed, interval_json, pair_of, paired
from controlplane.evaluations.decision import Decision, Finding, Verdict, decide
from controlplane.evaluations.gate_policy import GatePolicy, gate_policy
from controlplane.evaluations.habits import alarms, habits_of
from controlplane.evaluations.leakage import RowsGone, trained_digests
from controlplane.evaluations.models import (
    BatchScores,
    Evaluation,
    GateDecision,
    Result,
    SuiteVersion,
)
from controlplane.evaluations.suites import suite_get, suite_version_get
from controlplane.events.audit.services import record, recorded_at_end
from controlplane.events.outbox.models import EventType
from controlplane.events.outbox.services import publish
from controlplane.infra.locks import lock_until_commit
from controlplane.infra.metrics import GATE_DECISIONS, GATE_SCORES
from controlplane.queue.placement.residency import before_switch
from controlplane.tenancy.scoping import all_tenants, new_id, tenant_scope
from controlplane.tenants.models import Tenant
from controlplane.training.models import TrainingRun
from controlplane.training.runs import events

log = logging.getLogger(__name__)

GATE_TASK = "controlplane.evaluations.tasks.gates_decide"
_MAX_PER_TURN = 50
_MAX_REASONS = 20
_RELATED = (
    "version__adapter__live_version",
    "version__adapter__base_model",
    "candidate",
    "live",
    "suite_version__suite",
    "tenant",
)

Status = GateDecision.Status
_TRAINED = (AdapterVersion.Source.TRAINING, AdapterVersion.Source.CHECKPOINT)


def version_ready(adapter: Adapter, version: AdapterVersion) -> None:
    """Begin the gate of a training's version, in the transaction that makes it ready.

    Uploaded versions wait until somebody begins their gate.
    """
    if version.source != AdapterVersion.Source.TRAINING:
        return
    _open(adapter, version)


@transaction.atomic
def gate_begin(*, version: AdapterVersion) -> GateDecision:
    """Have a ready version that is not live compared with the live one, again if it was already.

    Raises Conflict while it is being compared, and for a version that cannot be.
    """
    _lock(version)
    adapter = promotion.lock(version.adapter_id)
    rows = AdapterVersion.objects.filter(pk=version.pk, status=AdapterVersion.Status.READY)
    if not rows.exists() or adapter.live_version in (None, version):
        raise Conflict(
            "A gate needs a ready version that is not live, and a live one to compare with.",
            code="version_not_comparable",
        )
    if not adapter.gate.get("suite"):
        raise Conflict("The adapter's `gate` names no suite: set one.", code="no_suite")
    before = GateDecision.objects.filter(version=version).first()
    if before is not None:
        if before.status == Status.WAITING:
            raise Conflict(
                "The version is being compared: wait for the result.", code="gate_waiting"
            )
        before.delete()
    return _open(adapter, version)


def _open(adapter: Adapter, version: AdapterVersion) -> GateDecision:
    gate = GateDecision.objects.create(version=version, policy=dict(adapter.gate))
    record("gate_begun", version, after={"policy": dict(adapter.gate)})
    transaction.on_commit(gates_send, robust=True)
    return gate


def gates_send() -> None:
    """Have waiting gates looked at now; else the sweep does."""
    try:
        current_app.send_task(GATE_TASK, (), queue="ops")
    except OperationalError as error:
        log.warning("a gate waits for the sweep: %r", error)


def gates_decide() -> None:
    """Begin the evaluations of waiting gates of all tenants, and decide those that have ended."""
    with all_tenants(reason="find waiting gates of all tenants"):
        rows = GateDecision.objects.filter(
            status=Status.WAITING, tenant__status=Tenant.Status.ACTIVE
        )
        waiting = list(rows.order_by("created_at").values_list("tenant_id", "pk")[:_MAX_PER_TURN])
    for tenant_id, gate_id in waiting:
        with tenant_scope(tenant_id):
            rows = GateDecision.objects.select_related(*_RELATED)
            gate = rows.filter(pk=gate_id).first()
            try:
                if gate is not None:
                    _advance(gate)
            except RateLimited:
                pass  # too many evaluations now: the next sweep tries again
            except Exception:
                log.exception("a gate was not decided", extra={"gate_id": str(gate_id)})


def _advance(gate: GateDecision) -> None:
    adapter = gate.version.adapter
    try:
        policy = gate_policy(gate.policy)
        if gate.candidate is None or gate.live is None:
            if gate.suite_version is not None:
                _hold(gate, "One of its evaluations was deleted.")
            else:
                _evaluate(gate, policy)
            return
        ended = (gate.candidate, gate.live)
        if any(evaluation.status in Evaluation.ACTIVE for evaluation in ended):
            return
        for evaluation in ended:
            if evaluation.status != Evaluation.Status.SUCCEEDED:
                why = evaluation.error or "no reason is known."
                _hold(gate, f"The evaluation of {evaluation.model} {evaluation.status}: {why}")
                return
        if adapter.live_version is None or adapter.live_version.number != gate.live_number:
            _hold(
                gate, f"Version {gate.live_number}, with which it was compared, is no longer live."
            )
            return
        _decide(gate, policy)
    except RateLimited:
        raise
    except RowsGone:
        _hold(
            gate, "The rows of its training were deleted, so it may have been trained on the cases."
        )
    except ApiError as error:
        if error.status >= 500:
            raise
        _hold(gate, f"It could not be compared: {error.message}")


def _evaluate(gate: GateDecision, policy: GatePolicy) -> None:
    """Begin both evaluations; the live version's is not repeated."""
    live = require(gate.version.adapter.live_version, "No version is live.")
    suite_version = suite_version_get(suite=suite_get(name=policy.suite))
    with transaction.atomic():
        rows = GateDecision.objects.select_for_update().filter(pk=gate.pk, candidate=None)
        if not rows.exists():
            return
        scores, why_not = batch_scores.matching(gate.version, live, suite_version)
        made = [
            _evaluation_of(gate, version, suite_version, policy, scores)
            for version in (gate.version, live)
        ]
        rows.update(
            candidate=made[0], live=made[1], live_number=live.number, suite_version=suite_version
        )
        _note_scores(gate, scores, why_not)


def _evaluation_of(
    gate: GateDecision,
    version: AdapterVersion,
    suite_version: SuiteVersion,
    policy: GatePolicy,
    scores: BatchScores | None,
) -> Evaluation:
    """Return the version's evaluation, an earlier one if the same program scored it.

    scores  that both sides have their log-probabilities of; None: workers are asked for both
    """
    model = f"{gate.version.adapter.name}@{version.number}"
    known = Evaluation.objects.filter(
        suite_version=suite_version,
        model=model,
        served=model,
        seed=0,
        max_tokens=policy.max_tokens,
        status=Evaluation.Status.SUCCEEDED,
    ).order_by("-created_at")
    scored_in = None if scores is None else scores.pk
    if found := known.filter(scored_in=scored_in).first():
        return found
    made = services.evaluation_create(
        principal=asking.principal_of(gate.tenant),
        model=model,
        suite_version=suite_version,
        max_tokens=policy.max_tokens,
        scored_in=scored_in,
    )
    if scores is not None and (answered := known.first()):
        _answers_copy(answered, made, version)
    return made


def _answers_copy(known: Evaluation, made: Evaluation, version: AdapterVersion) -> None:
    """Give an evaluation the answers of an earlier one of the same version, and its own scores."""
    scored, rows = batch_scores.scores_for(made, version.digest), []
    for row in Result.objects.filter(evaluation=known).select_related("case"):
        is_scored = row.logprob is not None  # else its request was refused
        row.logprob, row.num_tokens = scored[row.case.position] if is_scored else (None, 0)
        row.pk, row.evaluation = new_id(), made
        rows.append(row)
    Result.objects.bulk_create(rows)
    Evaluation.objects.filter(pk=made.pk).update(num_done=len(rows))


def _note_scores(gate: GateDecision, scores: BatchScores | None, why_not: str) -> None:
    """Record who scores the expected answers; why_not: why the batch's scores do not fit."""
    source = "workers" if scores is None else "batch"
    GATE_SCORES.labels(source).inc()
    told = {"gate_id": str(gate.pk), "source": source, "why": why_not}
    log.info("a gate's expected answers are scored", extra=told)
    run = TrainingRun.objects.filter(version=gate.version).first()
    if why_not and run is not None:
        message = f"The gate asks serving workers to score the expected answers: {why_not}"
        events.event_add(run, message)


def _decide(gate: GateDecision, policy: GatePolicy) -> None:
    assert gate.candidate is not None and gate.live is not None
    both_runs = paired(gate.live, gate.candidate)
    leaked = trained_digests(gate.version_id, {both.case.prompt_sha256 for both in both_runs})
    pairs = [pair_of(both, is_leaked=both.case.prompt_sha256 in leaked) for both in both_runs]
    fresh = [both for both in both_runs if both.case.prompt_sha256 not in leaked]
    decision = _guarded(gate, decide(pairs, policy.decision), fresh, policy)
    reasons = list(decision.reasons)
    if gate.version.source not in _TRAINED:
        reasons.append("It was not trained here, so it may have been trained on the cases.")
    outcome = {"promote": "promoted", "canary": "canary", "hold": "held"}[policy.on_pass]
    if decision.verdict != Verdict.PROMOTE:
        outcome = "held"
    if outcome == "promoted":
        before_switch(gate.version)  # the workers load it first
    try:
        # Aliases are locked before adapters, and the trail last.
        with transaction.atomic(), recorded_at_end():
            _lock(gate.version)
            if not GateDecision.objects.filter(pk=gate.pk, status=Status.WAITING).exists():
                return
            if outcome == "canary":
                _canary(gate, policy)
            _conclude(gate, Status(decision.verdict.value), reasons, outcome, decision)
    except Conflict as error:
        _hold(gate, f"It passed but could not go live: {error.message}", decision)


def _guarded(
    gate: GateDecision, decision: Decision, both_runs: Sequence[Changed], policy: GatePolicy
) -> Decision:
    """Note how both versions answer; a version that passed is held if a habit grew too much."""
    answered = [both for both in both_runs if not (both.before.error or both.after.error)]
    if not answered:
        return decision
    before = habits_of([(both.before.output, both.case.checks) for both in answered])
    after = habits_of([(both.after.output, both.case.checks) for both in answered])
    gate.habits = {"num": len(answered), "before": before.as_json(), "after": after.as_json()}
    found = alarms(before, after, policy.habits)
    if not found:
        return decision
    if decision.verdict == Verdict.PROMOTE:
        return dataclasses.replace(
            decision, verdict=Verdict.HOLD, reasons=(*found, *decision.reasons[1:])
        )
    return dataclasses.replace(decision, reasons=(*decision.reasons, *found))


def _hold(gate: GateDecision, why: str, decision: Decision | None = None) -> None:
    reasons = [why, *(decision.reasons if decision else ())]
    with transaction.atomic():
        _lock(gate.version)
        _conclude(gate, Status.HOLD, reasons, "held", decision)


def _lock(version: AdapterVersion) -> None:
    """Let nobody else begin or decide this version's gate until the transaction ends."""
    lock_until_commit(f"gate {version.pk}")


def _conclude(
    gate: GateDecision,
    status: Status,
    reasons: list[str],
    outcome: str,
    decision: Decision | None,
) -> None:
    """Write the decision, and make the version live if it passed. Call it in a transaction.

    Raises Conflict when the version, or the live one, is no longer the compared one.
    """
    adapter = promotion.lock(gate.version.adapter_id)
    changes: dict[str, Any] = {
        "status": status,
        "reasons": [reason[:500] for reason in reasons[:_MAX_REASONS]],
        "outcome": outcome,
        "decided_at": timezone.now(),
    }
    if decision is not None:
        changes |= {
            "findings": [_finding_json(finding) for finding in decision.findings],
            "habits": gate.habits,
            "num_leaked": decision.num_leaked,
        }
    if not GateDecision.objects.filter(pk=gate.pk, status=Status.WAITING).update(**changes):
        return
    version = gate.version
    publish(
        EventType.VERSION_GATED,
        adapter=adapter.name,
        version=version.number,
        decision=status.value,
        outcome=outcome,
        reasons=changes["reasons"],
    )
    GATE_DECISIONS.labels(status.value).inc()
    after = {"status": status.value, "outcome": outcome, "reasons": changes["reasons"]}
    if outcome == "promoted":
        _check_unchanged(gate, adapter)
        promotion.live_version_set(adapter, version, Promotion.Cause.GATE, reasons[0][:500])
    record("gated", version, after=after)


def _check_unchanged(gate: GateDecision, adapter: Adapter) -> None:
    rows = AdapterVersion.objects.filter(pk=gate.version_id, status=AdapterVersion.Status.READY)
    live = adapter.live_version
    if not rows.exists() or live is None or live.number != gate.live_number:
        raise Conflict("this version, or the live one, has changed since the comparison.")


def _canary(gate: GateDecision, policy: GatePolicy) -> None:
    """Make the version the canary of the adapter's alias, which is made if it does not exist."""
    adapter, reason = gate.version.adapter, "It passed the gate."
    canary = (Part(adapter=adapter.name, version=gate.version.number),)
    alias = Alias.objects.filter(name=adapter.name).first()
    percent = policy.canary_percent
    if alias is None:
        live = (Part(adapter=adapter.name),)
        contents = Contents(primary=live, canary=canary, canary_percent=percent)
        aliases.alias_create(name=adapter.name, contents=contents, reason=reason)
    else:
        changes = {"canary": canary, "canary_percent": percent}
        aliases.alias_change(alias=alias, changes=changes, reason=reason)


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {
        "metric": finding.metric.value,
        "slice": finding.slice,
        "drop": finding.drop,
        **interval_json(finding.interval),
        "is_worse": finding.is_worse,
        "is_as_good": finding.is_as_good,
    }
