"""The changes of a night: for each schedule with a slot, its newest run and the results.

Nothing is stored: the report is read from the history of schedules, the runs, and the gate's
decisions with their evaluations. Deleted ones are no longer shown.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from django.utils import timezone

from controlplane.errors import ApiError
from controlplane.evaluations.comparison import Comparison, evaluations_compare
from controlplane.evaluations.models import GateDecision
from controlplane.requestlog import captured
from controlplane.tenants.auth import Principal
from controlplane.training.models import ScheduleRun, TrainingRun

NIGHT = dt.timedelta(hours=24)
#: Number of shown schedules; those that need attention come first.
MAX_ENTRIES = 50
#: Number of entries with changed answers: each takes reading thousands of results.
MAX_COMPARED = 5
#: Number of slots that are read; more than 20 of a schedule are rare.
_MAX_SLOTS = 5000
#: Urgency of an entry, by the state of its newest slot.
_FIRST = {"failed": 0, "missed": 1, "cancelled": 2}
_LAST = 9
_GATE = (
    "version__adapter",
    "suite_version__suite",
    "candidate__suite_version__suite",
    "live__suite_version__suite",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The night of one schedule.

    row       the newest slot that ran; or else the newest one
    counts    number of slots by state
    before    the adapter's run before that succeeded; None: there is none
    compared  None: there is nothing to compare, or `compared_later`
    """

    row: ScheduleRun
    counts: Mapping[str, int]
    before: TrainingRun | None
    gate: GateDecision | None
    compared: Comparison | None = None
    compared_later: bool = False

    @property
    def adapter(self) -> str:
        return self.row.schedule.adapter.name

    @property
    def run(self) -> TrainingRun | None:
        return self.row.training_run

    @property
    def num_rows(self) -> int | None:
        """Return the number of the run's rows; None: there is no run, or it is unknown."""
        return self.run.num_rows if self.run else None

    @property
    def rows_added(self) -> int | None:
        """Return the number of rows added since the run before; None: it is unknown."""
        after, before = self.num_rows, self.row.rows_before
        return None if after is None or before is None else after - before

    @property
    def losses(self) -> list[list[float]]:
        return self._progress.get("losses") or []

    @property
    def validation_losses(self) -> list[list[float]]:
        return self._progress.get("validation_losses") or []

    @property
    def best_loss(self) -> float | None:
        """Return the loss in validation of the state that was kept."""
        return self._progress.get("best_loss")

    @property
    def best_loss_before(self) -> float | None:
        """Return the best validation loss of the run before."""
        return self.before.progress.get("best_loss") if self.before else None

    @property
    def _progress(self) -> dict[str, Any]:
        return self.run.progress if self.run else {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Morning:
    """The night from `since` to `until`. `num_more` schedules are not among the entries.

    num_pairs  of a corrected answer and the given one, which came in
    """

    since: dt.datetime
    until: dt.datetime
    entries: tuple[Entry, ...]
    num_more: int
    num_pairs: int
    counts: Mapping[str, int]


def morning_of(
    until: dt.datetime | None = None, *, by: Principal, adapter: str | None = None
) -> Morning:
    """Return the changes of the tenant in scope in the 24 hours up to `until`, by default now.

    by       who reads it: answers that they may not read are left out
    adapter  only this one's
    """
    until = until or timezone.now()
    since = until - NIGHT
    rows = ScheduleRun.objects.allowed().filter(slot__gt=since, slot__lte=until)
    if adapter is not None:
        rows = rows.filter(schedule__adapter__name=adapter)
    related = ("schedule__adapter", "schedule__dataset", "training_run__version")
    newest_first = rows.select_related(*related).order_by("-slot")[:_MAX_SLOTS]
    by_schedule: dict[uuid.UUID, list[ScheduleRun]] = {}
    for row in newest_first:
        by_schedule.setdefault(row.schedule_id, []).append(row)
    nights = sorted(by_schedule.values(), key=_urgency)
    shown = nights[:MAX_ENTRIES]
    return Morning(
        since=since,
        until=until,
        entries=tuple(_with_answers(_entries(shown), by)),
        num_more=len(nights) - len(shown),
        num_pairs=captured.num_pairs(since, until, adapter),
        counts=dict(Counter(row.state for night in nights for row in night)),
    )


def _urgency(night: Sequence[ScheduleRun]) -> tuple[int, int, str]:
    row = _shown(night)
    return _FIRST.get(row.state, _LAST), row.training_run_id is None, row.schedule.adapter.name


def _shown(night: Sequence[ScheduleRun]) -> ScheduleRun:
    """Return the slot that ran last, or the newest one if it was missed later."""
    ran = [(row.training_run.created_at, row) for row in night if row.training_run]
    if not ran:
        return night[0]
    last = max(ran, key=lambda pair: pair[0])[1]
    is_missed = night[0].status == ScheduleRun.Status.MISSED and night[0].slot > last.slot
    return night[0] if is_missed else last


def _entries(nights: Sequence[Sequence[ScheduleRun]]) -> list[Entry]:
    shown = [_shown(night) for night in nights]
    decided = GateDecision.objects.filter(version__in=_versions(shown))
    gates = {gate.version_id: gate for gate in decided.select_related(*_GATE)}
    return [
        Entry(
            row=row,
            counts=dict(Counter(each.state for each in night)),
            before=_run_before(row),
            gate=next((gates[key] for key in _versions([row]) if key in gates), None),
        )
        for row, night in zip(shown, nights, strict=True)
    ]


def _versions(rows: Sequence[ScheduleRun]) -> list[uuid.UUID]:
    """Return the versions that the slots' runs made."""
    runs = [row.training_run for row in rows if row.training_run]
    return [run.version_id for run in runs if run.version_id]


def _run_before(row: ScheduleRun) -> TrainingRun | None:
    if row.training_run is None:
        return None
    runs = TrainingRun.objects.filter(
        adapter_id=row.schedule.adapter_id,
        status=TrainingRun.Status.SUCCEEDED,
        created_at__lt=row.training_run.created_at,
    )
    return runs.order_by("-created_at").first()


def _with_answers(entries: Sequence[Entry], by: Principal) -> list[Entry]:
    """Compare the answers of the first entries whose gate has decided."""
    found: list[Entry] = []
    num_compared = 0
    for entry in entries:
        gate = entry.gate
        if gate is None or gate.candidate is None or gate.live is None:
            found.append(entry)
        elif num_compared >= MAX_COMPARED:
            found.append(dataclasses.replace(entry, compared_later=True))
        else:
            num_compared += 1
            found.append(dataclasses.replace(entry, compared=_compared(gate, by)))
    return found


def _compared(gate: GateDecision, by: Principal) -> Comparison | None:
    assert gate.candidate is not None and gate.live is not None
    try:
        return evaluations_compare(gate.live, gate.candidate, by=by)
    except ApiError:  # an evaluation has failed, or waits
        return None
