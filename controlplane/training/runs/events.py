"""The events of a run, as its owner reads them: messages, and the metrics of its steps."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.utils import timezone

from controlplane.tenancy.scoping import all_tenants
from controlplane.training.models import TrainingEvent, TrainingRun

Level, Kind = TrainingEvent.Level, TrainingEvent.Kind

#: Number of steps per attempt whose metrics are kept; in a longer run every second, third … one.
MAX_METRICS = 500
#: Metrics of runs that ended longer ago are removed; their messages stay as long as the run.
KEPT = dt.timedelta(days=90)
MAX_PER_TURN = 20_000
_MAX_CHARS = 2000


def event_add(
    run: TrainingRun, message: str, *, level: TrainingEvent.Level = Level.INFO, **data: Any
) -> TrainingEvent:
    """Add a message; call it in the transaction of what it tells, before `record`."""
    return TrainingEvent.objects.create(
        run=run, level=level, message=message[:_MAX_CHARS], data=data
    )


def metrics_forget(run: TrainingRun, *, after_step: int = 0) -> None:
    """Remove the metrics of later steps, because the run begins again after this one."""
    run.events.filter(kind=Kind.METRICS, data__step__gt=after_step).delete()


class StepMetrics:
    """The metrics of an attempt's steps; they wait here until `write`."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._waiting: list[TrainingEvent] = []
        self._last_step = 0
        self._num_kept = 0

    def note(self, progress: dict[str, Any]) -> None:
        """Keep the metrics of a step that the trainer reports, if it is one of those."""
        step, steps, loss = (progress.get(name) for name in ("step", "steps", "loss"))
        if not isinstance(step, int) or not isinstance(steps, int) or step <= self._last_step:
            return
        stride = max(1, -(-steps // MAX_METRICS))
        is_end = step in (1, steps)
        if (step % stride and not is_end) or self._num_kept >= MAX_METRICS + 2:
            return
        self._last_step = step
        self._num_kept += 1
        renamed = ("event", "loss", "steps")
        data = {name: value for name, value in progress.items() if name not in renamed}
        if "validation_loss" in data:
            data["valid_loss"] = data.pop("validation_loss")
        self._waiting.append(
            TrainingEvent(
                run=self._run,
                tenant_id=self._run.tenant_id,
                kind=Kind.METRICS,
                message=f"Step {step}/{steps}: training loss={loss}",
                data={**data, "total_steps": steps, "train_loss": loss},
            )
        )

    def write(self) -> None:
        """Write what waits."""
        if self._waiting:
            TrainingEvent.objects.bulk_create(self._waiting)
            self._waiting = []


def events_sweep() -> int:
    """Remove old metrics of all tenants, at most MAX_PER_TURN. -> their number."""
    before = timezone.now() - KEPT
    with all_tenants(reason="old metrics of all tenants are removed"):
        old = TrainingEvent.objects.filter(
            kind=Kind.METRICS, created_at__lt=before, run__finished_at__lt=before
        )
        keys = list(old.values_list("pk", flat=True)[:MAX_PER_TURN])
        return TrainingEvent.objects.filter(pk__in=keys).delete()[0]
