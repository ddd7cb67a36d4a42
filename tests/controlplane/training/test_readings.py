"""What the accountant tells of training: how long a run has waited that might have begun."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.utils import timezone

from contract.training.daily_window import DailyWindow
from controlplane.adapters.models import Adapter
from controlplane.training.models import TrainingRun
from controlplane.training.runs import readings
from tests.controlplane.training.conftest import FAST

pytestmark = pytest.mark.django_db


def waited_s() -> float:
    """`lorikeet_training_oldest_queued_seconds`, at which an alert looks."""
    [metric] = [m for m in readings.training() if m.name.endswith("oldest_queued_seconds")]
    [sample] = metric.samples
    return float(sample.value)


def window(opens: dt.datetime, ends: dt.datetime) -> DailyWindow | None:
    return DailyWindow.parse(f"{opens:%H:%M}-{ends:%H:%M}")


def test_a_run_that_waits_for_the_night_is_not_late(adapter: Adapter, settings: Any) -> None:
    now, hour = timezone.now(), dt.timedelta(hours=1)
    assert waited_s() == 0.0
    run = TrainingRun.objects.create(
        adapter=adapter, dataset_sha256="0" * 64, hyperparameters=FAST, num_rows=8
    )
    TrainingRun.objects.filter(pk=run.pk).update(created_at=now - 8 * hour)
    settings.TRAINING_WINDOW = None
    assert waited_s() == pytest.approx(8 * 3600, abs=60)
    settings.TRAINING_WINDOW = window(now + 2 * hour, now + 4 * hour)
    assert waited_s() == 0.0
    settings.TRAINING_WINDOW = window(now - 2 * hour, now + 2 * hour)
    assert waited_s() == pytest.approx(2 * 3600, abs=90)
    TrainingRun.objects.filter(pk=run.pk).update(created_at=now - hour)
    assert waited_s() == pytest.approx(3600, abs=60)
