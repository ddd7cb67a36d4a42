"""Read the numbers of runs and their progress, for the metrics of one process."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable

from django.conf import settings
from django.utils import timezone
from prometheus_client.core import Metric

from controlplane.infra.metrics import gauge
from controlplane.tenancy.scoping import all_tenants
from controlplane.training.models import TrainingRun
from controlplane.training.runs import picking

Status = TrainingRun.Status


def training() -> Iterable[Metric]:
    """Return the runs that have not ended, by status, and the progress of running ones."""
    with all_tenants(reason="runs of all tenants are counted"):
        runs = list(
            TrainingRun.objects.filter(status__in=TrainingRun.ACTIVE).values_list(
                "status",
                "created_at",
                "progress__step",
                "progress__steps",
                "progress__tokens_per_s",
            )
        )
        num_spent = picking.tenants_that_spent().count()
    now = timezone.now()
    counts = Counter(status for status, *_ in runs)
    queued = [_waited_s(created_at, now) for s, created_at, *_ in runs if s == Status.QUEUED]
    at_work = [numbers for status, _, *numbers in runs if status == Status.RUNNING]
    done, planned, speed = (sum(values[i] or 0 for values in at_work) for i in range(3))

    def one(name: str, about: str, value: float) -> Metric:
        return gauge(name, about, [((), value)])

    return [
        gauge(
            "lorikeet_training_runs",
            "Training runs that have not ended.",
            [((status.value,), float(counts[status])) for status in TrainingRun.ACTIVE],
            "status",
        ),
        one(
            "lorikeet_training_oldest_queued_seconds",
            "How long the oldest queued run has waited since the training window opened.",
            max(queued, default=0.0),
        ),
        one(
            "lorikeet_training_tenants_over_quota",
            "Tenants whose runs wait: they used up their device seconds.",
            num_spent,
        ),
        one("lorikeet_training_steps_done", "Steps that the running runs have done.", done),
        one("lorikeet_training_steps_planned", "Steps that the running runs have.", planned),
        one("lorikeet_training_tokens_per_second", "Tokens that the running runs train on.", speed),
    ]


def _waited_s(created_at: dt.datetime, now: dt.datetime) -> float:
    """Return the time in which a run might have begun, without waits for the training window."""
    window = settings.TRAINING_WINDOW
    if window is not None:
        if not window.is_open(now):
            return 0.0
        created_at = max(created_at, window.opened_at(now))
    return (now - created_at).total_seconds()
