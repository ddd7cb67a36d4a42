"""Ramps: the canary of an alias gets more and more requests, by a plan.

A step lasts for its minutes and until the canary has had its least number of requests; then the
next one makes a revision with a greater share. Each step is made by compare-and-set, so a ramp
stops when anything else changes the alias.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from django.db import transaction
from django.db.models import F, Q
from django.utils import timezone

from controlplane.aliases import services
from controlplane.aliases.comparison import compare
from controlplane.aliases.contents import Part, contents_of
from controlplane.aliases.counting import counts_of
from controlplane.aliases.models import Alias, AliasPart, AliasRevision, Ramp
from controlplane.errors import ApiError, Conflict, InvalidRequest, require
from controlplane.events.audit.origin import current_origin
from controlplane.events.audit.services import record
from controlplane.infra.hooks import Hook
from controlplane.tenancy.model_scope import check_named
from controlplane.tenancy.scoping import all_tenants, tenant_scope

log = logging.getLogger(__name__)

State = Ramp.State
MAX_STEPS = 10
#: Field of a step -> least and greatest value.
BOUNDS = {"percent": (1, 100), "minutes": (0, 14 * 24 * 60), "min_requests": (0, 1_000_000)}
DEFAULTS = {"minutes": 30, "min_requests": 50}
#: Number of steps that one tick takes; the next one continues.
MAX_PER_TICK = 500
#: Called with the new revision's parts after each step, in the tenant's scope.
step_taken = Hook[[Sequence[Part]], None]()
DEFAULT_STEPS = tuple({"percent": percent, **DEFAULTS} for percent in (1, 10, 50, 100))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of the current step.

    is_held  its time is over, but the canary has had too few requests
    """

    requests: int
    min_requests: int
    is_held: bool


def ramp_of(alias: Alias) -> Ramp:
    """Return the alias's newest ramp. Raises NotFound if it never had one."""
    return require(Ramp.objects.filter(alias=alias).first(), "This alias has had no ramp.")


def progress(ramp: Ramp, now: dt.datetime | None = None) -> Progress | None:
    """Return how far the current step is; None for a ramp that has ended."""
    revision = AliasRevision.objects.filter(
        alias_id=ramp.alias_id, number=ramp.revision_number
    ).first()
    if not ramp.is_active or revision is None:
        return None
    least = ramp.steps[ramp.step]["min_requests"]
    requests = counts_of(revision)[AliasPart.Target.CANARY].requests
    is_held = (now or timezone.now()) >= ramp.due_at and requests < least
    return Progress(requests=requests, min_requests=least, is_held=is_held)


@transaction.atomic
def ramp_start(
    *,
    alias: Alias,
    steps: Sequence[dict[str, Any]],
    at_end: str = Ramp.AtEnd.PROMOTE.value,
    reason: str = "",
    if_revision: int | None = None,
) -> Ramp:
    """Begin a ramp with its first step; it replaces an earlier one.

    Raises InvalidRequest that names the step, Conflict without a canary, PermissionDenied if the
    end makes a version of an adapter live that the caller may not name.
    """
    planned = _checked(steps)
    if at_end not in Ramp.AtEnd.values:
        raise InvalidRequest("at_end must be promote or stay.", param="at_end")
    alias = services.alias_ramp(
        alias=alias, percent=planned[0]["percent"], reason=reason, if_revision=if_revision
    )
    going = services.live_canary(contents_of(services.revision_get(alias=alias)))
    if going is not None and at_end == Ramp.AtEnd.PROMOTE:
        check_named(going.adapter, "at_end")  # no key is checked at the end of the ramp
    origin = current_origin()
    ramp, _ = Ramp.objects.update_or_create(
        alias=alias,
        defaults={
            "steps": planned,
            "at_end": at_end,
            "state": State.RUNNING,
            "step": 0,
            "revision_number": alias.revision_number,
            "due_at": _due_at(planned[0]),
            "reason": "",
            "actor_type": origin.actor_type,
            "actor_name": origin.actor_name or origin.actor_id[:320],
        },
    )
    record("ramp_started", alias, after={"steps": planned, "at_end": str(at_end)})
    return ramp


@transaction.atomic
def ramp_pause(*, alias: Alias) -> Ramp:
    """Let the current step last. Raises NotFound, Conflict for a ramp that does not run."""
    ramp = _locked(alias, State.RUNNING)
    return _moved(alias, ramp, "ramp_paused", state=State.PAUSED)


@transaction.atomic
def ramp_resume(*, alias: Alias) -> Ramp:
    """Continue a ramp; the current step's minutes begin again. Raises NotFound, Conflict."""
    ramp = _locked(alias, State.PAUSED)
    due_at = _due_at(ramp.steps[ramp.step])
    return _moved(alias, ramp, "ramp_resumed", state=State.RUNNING, due_at=due_at)


@transaction.atomic
def ramp_cancel(*, alias: Alias, reason: str = "") -> Ramp:
    """End a ramp; the canary keeps its share. Raises NotFound, Conflict for one that has ended."""
    ramp = _locked(alias, *Ramp.ACTIVE)
    return _moved(alias, ramp, "ramp_stopped", state=State.STOPPED, reason=reason)


def ramp_stop(alias: Alias, reason: str) -> None:
    """Stop the alias's ramp, if it has one that runs."""
    rows = Ramp.objects.filter(alias=alias, state__in=Ramp.ACTIVE)
    rows.update(state=State.STOPPED, reason=reason, updated_at=timezone.now())


def ramps_advance(now: dt.datetime | None = None) -> int:
    """Take the steps that are due at `now` (default: the present). -> their number.

    Any number of calls may run at the same time.
    """
    now = now or timezone.now()
    is_due = Q(state=State.RUNNING, due_at__lte=now)
    is_overtaken = Q(state__in=Ramp.ACTIVE) & ~Q(revision_number=F("alias__revision_number"))
    with all_tenants(reason="find the ramps of all tenants"):
        # Ramps that had nothing to do at the last look come last.
        rows = Ramp.objects.filter(is_due | is_overtaken).order_by("updated_at")
        due = list(rows.values_list("alias_id", "tenant_id")[:MAX_PER_TICK])
    num_taken = 0
    for alias_id, tenant_id in due:
        with tenant_scope(tenant_id):
            try:
                num_taken += _advance(alias_id, now)
            except Exception:  # continue with the others
                log.exception("a ramp failed", extra={"alias_id": str(alias_id)})
    return num_taken


@transaction.atomic
def _advance(alias_id: uuid.UUID, now: dt.datetime) -> bool:
    """Take a ramp's next step if it is due. -> False if it is not, or the ramp stopped."""
    alias = Alias.objects.select_for_update().filter(pk=alias_id).first()
    if alias is None:
        return False
    ramp = Ramp.objects.select_for_update().get(alias=alias)
    if not ramp.is_active:
        return False
    if ramp.revision_number != alias.revision_number:
        reason = f"Revision {alias.revision_number} was made by another change."
        _moved(alias, ramp, "ramp_stopped", state=State.STOPPED, reason=reason)
        return False
    if ramp.state != State.RUNNING or ramp.due_at > now:
        return False
    comparison = compare(services.revision_get(alias=alias))
    if comparison.canary.requests < ramp.steps[ramp.step]["min_requests"] or comparison.problems:
        ramp.save(update_fields=["updated_at"])
        return False
    try:
        with transaction.atomic():
            _take_step(alias, ramp, now)
    except ApiError as error:  # a version was retired, say
        _moved(alias, ramp, "ramp_stopped", state=State.STOPPED, reason=error.message)
        return False
    parts = contents_of(services.revision_get(alias=alias)).parts
    transaction.on_commit(functools.partial(step_taken, parts), robust=True)
    return True


def _take_step(alias: Alias, ramp: Ramp, now: dt.datetime) -> None:
    """Do what comes after the current step. Raises ApiError."""
    number = ramp.step + 1
    if number == len(ramp.steps):
        if ramp.at_end == Ramp.AtEnd.PROMOTE:
            alias = services.canary_promote(
                alias=alias, reason="The ramp has ended.", if_revision=ramp.revision_number
            )
        _moved(alias, ramp, "ramp_done", state=State.DONE, revision_number=alias.revision_number)
        return
    step = ramp.steps[number]
    alias = services.alias_ramp(
        alias=alias,
        percent=step["percent"],
        reason=f"Step {number + 1} of {len(ramp.steps)} of the ramp.",
        if_revision=ramp.revision_number,
    )
    ramp.step, ramp.revision_number = number, alias.revision_number
    ramp.due_at = _due_at(step, now)
    ramp.save()


def _due_at(step: Mapping[str, Any], now: dt.datetime | None = None) -> dt.datetime:
    return (now or timezone.now()) + dt.timedelta(minutes=step["minutes"])


def _locked(alias: Alias, *states: str) -> Ramp:
    """Return the alias's ramp, locked after the alias. Raises NotFound, Conflict."""
    Alias.objects.select_for_update().filter(pk=alias.pk).first()
    ramp = Ramp.objects.select_for_update().filter(alias=alias).first()
    ramp = require(ramp, "This alias has had no ramp.")
    if ramp.state not in states:
        raise Conflict(f"The ramp {ramp.get_state_display()}.", code="ramp_state")
    return ramp


def _moved(alias: Alias, ramp: Ramp, action: str, **fields: Any) -> Ramp:
    """Change a locked ramp, with an audit event of its alias."""
    for name, value in fields.items():
        setattr(ramp, name, value)
    ramp.save()
    after = {"state": str(ramp.state), "step": ramp.step + 1}
    record(action, alias, after=after | ({"reason": ramp.reason} if ramp.reason else {}))
    return ramp


def _checked(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Return the steps in normal form. Raises InvalidRequest that names the field."""
    if not 1 <= len(steps) <= MAX_STEPS:
        raise InvalidRequest(f"A ramp must have 1 to {MAX_STEPS} steps.", param="steps")
    planned: list[dict[str, int]] = []
    for number, step in enumerate(steps):
        for name in step:
            if name not in BOUNDS:
                raise InvalidRequest(
                    "There is no such field: remove it.", param=f"steps.{number}.{name[:100]}"
                )
        planned.append({name: _whole(step, number, name) for name in BOUNDS})
    percents = [step["percent"] for step in planned]
    if percents != sorted(set(percents)):
        raise InvalidRequest(
            "The percent of each step must be greater than that of the step before.", param="steps"
        )
    return planned


def _whole(step: Mapping[str, Any], number: int, name: str) -> int:
    value = step.get(name, DEFAULTS.get(name))
    least, most = BOUNDS[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidRequest(
            f"{name} is a whole number from {least:,} to {most:,}.", param=f"steps.{number}.{name}"
        )
    return value
