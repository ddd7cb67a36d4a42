"""A run whose trainer dies, or that is paused, goes on from its state; cancelled, it ends soon."""

from __future__ import annotations

import datetime as dt
import errno
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.utils import timezone

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.deletion import services as deletion
from controlplane.errors import Unavailable
from controlplane.infra import storage
from controlplane.training import tasks
from controlplane.training.models import Dataset, TrainingRun
from controlplane.training.runs import (
    batch_child,
    endings,
    events,
    execution,
    lost_runs,
    pausing,
    picking,
    running,
)
from controlplane.training.runs import (
    services as run_services,
)
from controlplane.training.runs.attempt import Attempt
from controlplane.training.runs.kept.saved_states import KEPT
from controlplane.training.runs.trainer import NO_ROOM
from controlplane.usage.limits import quotas
from tests.controlplane.training.test_execution import (
    background,
    execute,
    is_begun,
    make_run,
    progress_of,
    trainers,
    wait_for,
)

pytestmark = pytest.mark.django_db(transaction=True)
TICK_S = running.TICK_S


@pytest.fixture
def endless(
    adapter: Adapter, dataset: Dataset, any_trainer: None, monkeypatch: pytest.MonkeyPatch
) -> TrainingRun:
    monkeypatch.setattr(running, "TICK_S", 0.05)
    monkeypatch.setattr(batch_child, "CHECKPOINT_S", 0.1)
    return make_run(max_steps=20_000)


@pytest.fixture
def begun(endless: TrainingRun) -> Callable[[], threading.Thread]:
    """Starts an attempt, and returns once a state of it is saved."""

    def begin() -> threading.Thread:
        attempt = progress_of(endless) is not None and endless.attempts + 1
        thread = background(endless, lambda: execution.training_run_execute(endless.pk))
        wait_for(lambda: is_begun(endless, attempt) and "saved_step" in progress_of(endless))
        return thread

    return begin


def missing_steps(run: TrainingRun) -> set[int]:
    """Of the steps before the one from which a run goes on: those without metrics."""
    told = run.events.filter(kind="metrics").values_list("data__step", flat=True)
    return set(range(1, resumed(run)[-1] + 1)) - set(told)


def resumed(run: TrainingRun) -> list[int]:
    said = run.events.filter(message__startswith="The job continues").order_by("pk")
    return [data["step"] for data in said.values_list("data", flat=True)]


def states(run: TrainingRun) -> list[str]:
    return list(storage.keys(f"t/{run.tenant_id}/checkpoints/"))


def cancel(run: TrainingRun, thread: threading.Thread) -> None:
    run_services.training_run_cancel(run=run)
    thread.join(60)
    run.refresh_from_db()
    assert run.status == "cancelled"


def test_killed_again_and_again_it_goes_on_here_and_on_another_machine(
    endless: TrainingRun, begun: Any
) -> None:
    """More often than a run may lose trainers that come no further."""
    for attempt in range(1, endings.MAX_LOST + 2):
        thread = begun()
        saved = endless.progress["saved_step"]
        os.kill(trainers()[0].pid, signal.SIGKILL)
        thread.join(60)
        endless.refresh_from_db()
        assert (endless.status, endless.attempts, endless.num_lost) == ("queued", attempt, 1)
        if attempt == 2:  # the next one has another disk
            shutil.rmtree(Path(django_settings.WORK_DIR) / "runs" / str(endless.pk))
        assert states(endless) == [
            f"t/{endless.tenant_id}/checkpoints/{endless.pk}.{attempt}.safetensors"
        ]
    thread = begun()
    steps = resumed(endless)
    assert len(steps) == attempt and steps == sorted(steps) and steps[-1] >= saved > 0
    curve = [step for step, _ in endless.progress["losses"]]
    assert curve[0] == 1 and curve == sorted(set(curve))  # that of all attempts
    cancel(endless, thread)
    tasks.datasets_sweep()
    assert not states(endless) and endless.stored_step is None


def test_a_trainer_that_comes_no_further_is_lost_six_times_and_no_more(
    adapter: Adapter, dataset: Dataset, any_trainer: None
) -> None:
    """Killed in quick succession it waits, so that it is not given up for one bad minute."""
    run = make_run(max_steps=20_000)
    TrainingRun.objects.update(attempts=7)
    for num_lost in range(1, endings.MAX_LOST):
        TrainingRun.objects.update(status="running", started_at=timezone.now())
        run.refresh_from_db()
        endings.run_give_back(run)
        run.refresh_from_db()
        assert (run.status, run.num_lost) == ("queued", num_lost)
        wait_s = picking.WAITS_S.get(num_lost, 0)
        assert picking.runs_that_may_begin().exists() == (wait_s == 0)
        assert (f"begins {wait_s} s after" in run.events.last().message) == (wait_s > 0)
        TrainingRun.objects.update(started_at=timezone.now() - dt.timedelta(seconds=wait_s))
        assert picking.runs_that_may_begin().exists()
    TrainingRun.objects.update(status="running")
    endings.run_give_back(run)
    run.refresh_from_db()
    assert (run.status, run.error_code) == ("failed", "trainer_lost")
    assert "lost 6 times in a row" in run.error
    TrainingRun.objects.update(status="running", num_lost=endings.MAX_ATTEMPTS - 1)
    endings.run_give_back(run, why=NO_ROOM, code="disk_full")  # its reason is known
    run.refresh_from_db()
    assert (run.status, run.error_code) == ("failed", "disk_full")


def test_a_state_that_a_trainer_saved_after_its_platform_died_is_progress(
    adapter: Adapter, dataset: Dataset
) -> None:
    run = make_run(max_steps=20_000)
    TrainingRun.objects.update(attempts=2)
    run.refresh_from_db()
    for resumed_step, has_advanced in ((5, True), (5, False), (9, True)):
        attempt = Attempt(run)
        attempt.note({"event": "started", "resumed_step": resumed_step})
        attempt.write()
        assert attempt.has_advanced is has_advanced


def test_paused_it_waits_and_goes_on(
    endless: TrainingRun, begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_METRICS", 20_000)  # of each step
    thread = begun()
    pausing.training_run_pause(run=endless)
    thread.join(60)
    endless.refresh_from_db()
    assert (endless.status, endless.num_lost) == ("paused", 0)
    saved = endless.progress["saved_step"]
    lost_runs.training_runs_reconcile()
    tasks.datasets_sweep()
    pausing.training_run_resume(run=endless)
    thread = begun()
    assert resumed(endless)[0] >= saved
    assert missing_steps(endless) == set()
    cancel(endless, thread)


def test_cancelled_a_run_ends_within_5_s(
    endless: TrainingRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as the platform looks; also when its trainer is deaf, as in a long step."""
    monkeypatch.setattr(running, "TICK_S", TICK_S)
    for is_deaf in (False, True):
        run = endless if not is_deaf else make_run(max_steps=20_000)
        thread = background(run, lambda run=run: execution.training_run_execute(run.pk))
        wait_for(lambda run=run: len(trainers()) == 1)
        if is_deaf:
            trainers()[0].suspend()
        began = time.monotonic()
        run_services.training_run_cancel(run=run)
        wait_for(lambda run=run: is_cancelled(run))
        assert time.monotonic() - began < 5
        thread.join(60)
        assert not trainers()


def is_cancelled(run: TrainingRun) -> bool:
    run.refresh_from_db()
    return run.status == "cancelled"


def test_while_the_store_takes_nothing_a_run_says_so_once_and_goes_on(
    endless: TrainingRun, begun: Any, settings: Any
) -> None:
    thread = begun()
    there = settings.S3_ENDPOINT_URL
    settings.S3_ENDPOINT_URL = "http://127.0.0.1:9"
    wait_for(lambda: endless.events.filter(message__startswith="The object store").exists())
    step = progress_of(endless)["saved_step"]
    wait_for(lambda: progress_of(endless)["saved_step"] > step)
    settings.S3_ENDPOINT_URL = there
    before = stored(endless)
    wait_for(lambda: stored(endless) != before)
    [told] = endless.events.filter(level="warn")
    assert told.message.endswith("its state is on the trainer's disk")
    assert endless.status == "running"
    cancel(endless, thread)


def stored(run: TrainingRun) -> list[bytes]:
    """The states in the store, as they are now."""
    return [storage.read_bytes(key, max_bytes=1 << 24) for key in states(run)]


def test_a_full_disk_queues_the_run_again_and_its_error_says_so(
    adapter: Adapter, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the rows are to be written; nothing is trained."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(running.RunningRun, "_fetch", full)
    run = make_run()
    for status in ("queued", "queued", "failed"):
        assert execute(run).status == status
    assert run.error_code == "disk_full"
    assert run.error.startswith("No room is left on the trainer's disk, 3 times in a row.")
    told = run.events.filter(level="warn").values_list("message", flat=True)
    assert set(told) == {"No room is left on the trainer's disk; the job is queued again"}


def test_a_run_that_was_trained_is_published_without_training_it_again(
    adapter: Adapter, dataset: Dataset, any_trainer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer was killed as it was to upload the files."""
    run = make_run()

    def die(**_: Any) -> None:
        raise SystemError

    with monkeypatch.context() as patch:
        patch.setattr(running.adapter_services, "adapter_version_upload_files", die)
        execute(run)
    lost_runs.training_runs_reconcile()
    run.refresh_from_db()
    assert run.status == "queued"
    with monkeypatch.context() as patch:
        # No trainer would start.
        patch.setattr(batch_child, "sys", SimpleNamespace(executable="/nowhere"))
        execute(run)
    assert (run.status, run.attempts, run.progress["step"]) == ("succeeded", 2, 2)
    assert AdapterVersion.objects.filter(status="ready").count() == 1


def test_a_run_that_failed_keeps_its_last_good_state_for_a_week(
    endless: TrainingRun, begun: Any, settings: Any
) -> None:
    thread = begun()
    wait_for(lambda: bool(states(endless)))
    os.kill(trainers()[0].pid, signal.SIGKILL)
    thread.join(60)
    settings.TRAINING_MAX_RUN_S = 0.0
    execute(endless)  # its time is over at once
    assert (endless.status, endless.error_code) == ("failed", "time_limit")
    tasks.datasets_sweep()
    assert states(endless)
    assert endless.finished_at is not None
    TrainingRun.objects.update(finished_at=endless.finished_at - KEPT)
    tasks.datasets_sweep()
    assert not states(endless)


def test_a_saved_state_counts_in_the_storage_until_the_run_has_ended(
    endless: TrainingRun, begun: Any
) -> None:
    before = quotas.used("storage_bytes")
    thread = begun()

    def is_counted() -> bool:
        """A newer state may take the place of the one that was looked at: then once more."""
        endless.refresh_from_db()
        sizes = [storage.object_size(key) for key in states(endless)]
        return [quotas.used("storage_bytes") - before] == [endless.stored_bytes] == sizes

    wait_for(is_counted)
    assert endless.stored_bytes > 0
    cancel(endless, thread)
    tasks.datasets_sweep()
    assert quotas.used("storage_bytes") == before


def test_a_state_without_room_stays_on_the_disk_and_the_run_goes_on(
    adapter: Adapter, dataset: Dataset, any_trainer: None, settings: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(running, "TICK_S", 0.05)
    monkeypatch.setattr(batch_child, "CHECKPOINT_S", 0.1)
    run = make_run(max_steps=20_000)
    usual = settings.TENANT_QUOTAS
    settings.TENANT_QUOTAS = usual | {"storage_bytes": quotas.used("storage_bytes")}
    thread = background(run, lambda: execution.training_run_execute(run.pk))
    wait_for(lambda: run.events.filter(message__contains="stays on the trainer's disk").exists())
    assert not states(run)
    settings.TENANT_QUOTAS = usual
    wait_for(lambda: bool(states(run)))
    cancel(run, thread)


def test_a_runs_own_state_does_not_keep_its_adapter_out(
    adapter: Adapter, dataset: Dataset, any_trainer: None, settings: Any
) -> None:
    run = make_run()
    used = quotas.used("storage_bytes")
    TrainingRun.objects.update(stored_step=1, stored_bytes=1 << 20)
    settings.TENANT_QUOTAS = settings.TENANT_QUOTAS | {"storage_bytes": used + (1 << 20)}
    execute(run)
    assert run.status == "succeeded"
    assert 0 < quotas.used("storage_bytes") - used < 1 << 20


def test_folders_of_runs_that_ended_elsewhere_go_when_any_run_begins(
    adapter: Adapter, dataset: Dataset, any_trainer: None
) -> None:
    run = make_run()
    left = Path(django_settings.WORK_DIR) / "runs" / f"{uuid.uuid4()}.3"
    left.mkdir(parents=True)
    (left.parent / "lost+found").mkdir(exist_ok=True)  # not ours
    execution.training_next()
    run.refresh_from_db()
    assert run.status == "succeeded"
    assert [path.name for path in left.parent.glob("*")] == ["lost+found"]
    (left.parent / "lost+found").rmdir()


def test_a_deleted_adapters_runs_leave_no_state(
    adapter: Adapter, dataset: Dataset, settings: Any
) -> None:
    run = make_run()
    key = f"t/{run.tenant_id}/checkpoints/{run.pk}.2.safetensors"
    storage.put_bytes(key, b"1")
    TrainingRun.objects.update(status="failed", stored_step=1, attempts=2)
    there = settings.S3_ENDPOINT_URL
    settings.S3_ENDPOINT_URL = "http://127.0.0.1:9"
    with pytest.raises(Unavailable):
        deletion.adapter_delete(adapter=adapter)
    settings.S3_ENDPOINT_URL = there
    assert states(run) == [key]
    deletion.adapter_delete(adapter=adapter)
    assert not states(run) and not TrainingRun.objects.exists()
