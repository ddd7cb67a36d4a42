"""The start page: numbers of the platform's health, each with a link to its page."""

from __future__ import annotations

import dataclasses

from django.db.models import QuerySet
from django.urls import reverse

from controlplane.errors import Unavailable
from controlplane.files.batches.models import Batch
from controlplane.operator.pages.dead_letters import waiting_letters
from controlplane.operator.pages.rendering import span
from controlplane.operator.pages.workers import groups
from controlplane.operator.waiting import class_queues
from controlplane.queue.dead_letters import quarantined
from controlplane.training.models import TrainingRun

#: Rows of the database are counted up to here.
_MANY = 1000


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """One number, its subject, and a link."""

    title: str
    value: str
    note: str
    link: str
    tone: str = "good"  # or "warn", "bad"


def tiles() -> list[Tile]:
    """Return the platform's health, the pool's first."""
    try:
        found = _pool_tiles()
    except Unavailable as error:
        found = [Tile("Workers", "?", error.message, reverse("admin:workers"), "bad")]
    letters = waiting_letters(_MANY)
    queued = _active(TrainingRun.objects.filter(status=TrainingRun.Status.QUEUED))
    training = _active(TrainingRun.objects.filter(status__in=TrainingRun.ACTIVE))
    batches = _active(Batch.objects.filter(status__in=Batch.ACTIVE))
    runs = reverse("admin:training_trainingrun_changelist")
    return [
        *found,
        Tile(
            "Dead letters",
            _counted(letters),
            "not requeued",
            f"{reverse('admin:dead_letters')}?state=open",
            "warn" if letters else "good",
        ),
        Tile("Training runs", _counted(training), f"{_counted(queued)} of them wait", runs),
        Tile("Batches", _counted(batches), "not ended", ""),
    ]


def _pool_tiles() -> list[Tile]:
    pool, queues, held = groups(), class_queues(), quarantined()
    ready, known = sum(one.ready for one in pool), sum(len(one.workers) for one in pool)
    unserved = [one.base_model for one in pool if not one.ready]
    waiting = sum(queue.requests for queue in queues)
    oldest = max((queue.oldest_s for queue in queues), default=0.0)
    return [
        Tile(
            "Workers ready",
            f"{ready} of {known}",
            f"no worker for {', '.join(unserved[:3])}" if unserved else "every base model served",
            reverse("admin:workers"),
            "good" if not unserved else "warn" if ready else "bad",
        ),
        Tile(
            "Requests that wait",
            f"{waiting:,}",
            f"the oldest for {span(oldest)}" if waiting else "none waits",
            reverse("admin:queues"),
            "bad" if waiting and not ready else "good",
        ),
        Tile(
            "Quarantined adapters",
            str(len(held)),
            "not served" if held else "all are served",
            reverse("admin:quarantine"),
            "warn" if held else "good",
        ),
    ]


def _active(rows: QuerySet[TrainingRun] | QuerySet[Batch]) -> int:
    return len(rows.order_by().values_list("pk", flat=True)[:_MANY])


def _counted(number: int) -> str:
    return f"{number:,} or more" if number >= _MANY else f"{number:,}"
