"""Several runs in one child: real trainer, real database, real object store."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import connection

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.adapters.services import adapter_create, base_model_add
from controlplane.infra import storage
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.training import tasks
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import TrainingRun
from controlplane.training.runs import (
    batch_child,
    events,
    execution,
    pausing,
    picking,
    running,
    trainer,
)
from controlplane.training.runs import (
    services as run_services,
)
from controlplane.usage.models import TrainingUsage
from tests.controlplane.conftest import Party
from tests.controlplane.training.conftest import FAST, ROWS, SHARED_ROWS
from tests.controlplane.training.test_execution import (
    check_that_it_has_no_secret,
    trainers,
    wait_for,
)

pytestmark = pytest.mark.django_db(transaction=True)
#: So many that a test ends them.
ENDLESS = 20_000
TICK_S = running.TICK_S


@pytest.fixture(autouse=True)
def together(settings: Any, tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.TRAIN_BATCH = 4
    monkeypatch.setattr(running, "TICK_S", 0.05)
    monkeypatch.setattr(execution, "JOIN_S", 0.5)


def make_run(party: Party, rows: bytes = ROWS, **hyperparameters: Any) -> TrainingRun:
    with tenant_scope(party.tenant.id):
        if not Adapter.objects.exists():
            adapter_create(name="greeter", base_model_name="tiny-llama")
            dataset_services.dataset_upload(name="chats", content=rows)
        return run_services.training_run_create(
            adapter_name="greeter", dataset_name="chats", hyperparameters=FAST | hyperparameters
        )


def fresh(run: TrainingRun) -> TrainingRun:
    with tenant_scope(run.tenant_id):
        run.refresh_from_db()
    return run


def step_of(run: TrainingRun) -> int:
    step: int = fresh(run).progress.get("step", 0)
    return step


@pytest.fixture
def night() -> Iterator[Any]:
    """Starts what the message of a run starts, in a thread."""
    threads = []

    def start() -> threading.Thread:
        def work() -> None:
            try:
                execution.training_next()
            finally:
                connection.close()

        thread = threading.Thread(target=work)
        thread.start()
        threads.append(thread)
        return thread

    yield start
    for child in trainers():
        child.kill()
    for thread in threads:
        thread.join(60)


def kept() -> list[str]:
    return [path.name for path in (Path(django_settings.WORK_DIR) / "runs").glob("*")]


def test_two_tenants_runs_share_a_child_and_each_gets_its_own_adapter(
    acme: Party, globex: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    children: list[tuple[list[str], bytes]] = []
    hand_out = batch_child.BatchChild._hand_out

    def look(self: Any, child: Any) -> None:
        while not (environ := Path(f"/proc/{child.pid}/environ").read_bytes()):
            time.sleep(0.01)
        children.append((child.args, environ))
        hand_out(self, child)

    monkeypatch.setattr(batch_child.BatchChild, "_hand_out", look)
    runs = [
        make_run(acme, rank=2),
        make_run(globex, ROWS.replace(b"world", b"moon"), max_steps=3, seed=1),
    ]
    began = time.monotonic()
    tasks.training_run_execute(str(acme.tenant.id), str(runs[0].pk))
    most_ms = (time.monotonic() - began) * 1000
    tensors, shared_ms = [], 0
    for run, steps in zip(runs, (2, 3), strict=True):
        fresh(run)
        assert (run.status, run.error, run.attempts) == ("succeeded", "", 1)
        assert (run.progress["step"], run.progress["eta_s"]) == (steps, 0)
        with tenant_scope(run.tenant_id):
            version = AdapterVersion.objects.get()
            assert (run.version, version.status) == (version, "ready")
            metrics = run.events.filter(kind="metrics").order_by("pk")
            told = list(metrics.values_list("data", flat=True))
            used = TrainingUsage.objects.get()
        assert [data["step"] for data in told] == list(range(1, steps + 1))
        assert all(data["memory_bytes"] > 0 for data in told)
        assert told[-1]["trained_tokens"] == used.trained_tokens == run.trained_tokens > 0
        shared_ms += used.device_ms
        tensors.append(storage.read_bytes(version.tensors_key, max_bytes=1 << 24))
    assert tensors[0] != tensors[1]
    assert 0 < shared_ms <= most_ms  # not each the whole time
    [(arguments, environ)] = children
    assert {str(run.pk) for run in runs} <= {Path(word).parent.name for word in arguments}
    check_that_it_has_no_secret(environ)
    assert not trainers() and not kept()


def test_runs_join_a_batch_and_one_that_is_cancelled_ends_within_5_s(
    acme: Party, globex: Party, night: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as the platform looks; the others go on, in the one child."""
    monkeypatch.setattr(running, "TICK_S", TICK_S)
    first = make_run(acme, SHARED_ROWS, max_steps=ENDLESS)
    thread = night()
    wait_for(lambda: step_of(first) > 0)
    [child] = trainers()
    second = make_run(globex, max_steps=ENDLESS)
    wait_for(lambda: step_of(second) > 0)
    with tenant_scope(first.tenant_id):
        run_services.training_run_cancel(run=first)
    began = time.monotonic()
    wait_for(lambda: fresh(first).status == "cancelled")
    assert time.monotonic() - began < 5
    third = make_run(acme, max_steps=3, validation_share=0.5, eval_steps=1)
    wait_for(lambda: fresh(third).status == "succeeded")
    assert [step for step, _ in third.progress["validation_losses"]] == [1, 2, 3]
    assert third.progress["best_loss"] > 0
    seen = step_of(second)
    wait_for(lambda: step_of(second) > seen + 3)
    assert trainers() == [child]
    assert [run.attempts for run in (fresh(first), fresh(second), third)] == [1, 1, 1]
    with tenant_scope(second.tenant_id):
        run_services.training_run_cancel(run=second)
    thread.join(60)
    assert not thread.is_alive() and not child.is_running() and not kept()
    assert fresh(second).status == "cancelled"


def test_a_child_that_is_lost_after_a_run_was_cancelled_is_in_the_log(
    acme: Party, globex: Party, night: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled, other = (make_run(party, max_steps=ENDLESS) for party in (acme, globex))
    thread = night()
    wait_for(lambda: all(step_of(run) > 0 for run in (cancelled, other)))
    with tenant_scope(cancelled.tenant_id):
        run_services.training_run_cancel(run=cancelled)
    wait_for(lambda: fresh(cancelled).status == "cancelled")
    os.kill(trainers()[0].pid, signal.SIGKILL)
    thread.join(60)
    assert fresh(other).status == "queued"
    [line] = [record for record in caplog.records if record.getMessage() == "the batch ended"]
    assert line.exit_code == -signal.SIGKILL  # type: ignore[attr-defined]


def test_who_joins_a_batch_keeps_nobody_waiting(acme: Party, globex: Party) -> None:
    """Neither a run of another base model, nor one that is to be trained by itself."""
    batch_of = make_run(globex)
    first, second = make_run(acme), make_run(acme)
    with all_tenants(reason="test"):
        TrainingRun.objects.filter(pk=batch_of.pk).update(status="running")
        runs = TrainingRun.objects.select_related("adapter")
        begun = runs.get(pk=batch_of.pk)
    assert picking.next_to_join(begun) == first
    with all_tenants(reason="test"):
        TrainingRun.objects.filter(pk=first.pk).update(num_lost=picking.LOST_TOGETHER)
    assert picking.next_to_join(begun) is None
    assert picking.next_run(beside=begun) == second
    with tenant_scope(acme.tenant.id):
        config = BaseModel.objects.get(name="tiny-llama").config
        base_model_add(name="other-llama", revision="1" * 64, config=config)
        adapter_create(name="other", base_model_name="other-llama")
        TrainingRun.objects.filter(pk=first.pk).update(
            num_lost=0, adapter=Adapter.objects.get(name="other")
        )
    assert picking.next_to_join(begun) is None
    assert picking.run_claim_next(beside=begun, in_turn=True) is None
    with tenant_scope(acme.tenant.id):
        run_services.training_run_cancel(run=fresh(first))
    claimed = picking.run_claim_next(beside=begun, in_turn=True)
    assert claimed == second and claimed.status == "running"


def test_a_killed_child_costs_no_run_more_than_its_last_checkpoint(
    acme: Party, globex: Party, night: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the one that goes on at another machine, which has nothing of it on its disk."""
    monkeypatch.setattr(batch_child, "CHECKPOINT_S", 0.05)
    runs = [make_run(party, max_steps=ENDLESS) for party in (acme, globex)]
    thread = night()
    wait_for(lambda: all(step_of(run) > 20 for run in runs))
    os.kill(trainers()[0].pid, signal.SIGKILL)
    thread.join(60)
    assert [(fresh(run).status, run.attempts) for run in runs] == [("queued", 1)] * 2
    assert sorted(kept()) == sorted(str(run.pk) for run in runs)
    assert all(list(storage.keys(checkpoints_of(run))) for run in runs)
    shutil.rmtree(Path(django_settings.WORK_DIR) / "runs" / str(runs[0].pk))

    first_seen: dict[str, int] = {}
    monkeypatch.setattr(trainer.Told, "note", note_first(first_seen))
    thread = night()
    wait_for(lambda: len(first_seen) == 2)
    assert all(step > 10 for step in first_seen.values())
    wait_for(lambda: all(step_of(run) > 80 for run in runs))
    for run in runs:
        assert fresh(run).attempts == 2
        with tenant_scope(run.tenant_id):
            said = run.events.get(message__startswith="The job continues")
            steps = run.events.filter(kind="metrics").values_list("data__step", flat=True)
            assert set(steps) >= {1, 40} and said.data["step"] > 10
            run_services.training_run_cancel(run=run)
    thread.join(60)
    for run in runs:
        with tenant_scope(run.tenant_id):
            used = TrainingUsage.objects.get()  # of the attempt that was not lost
            steps = list(run.events.filter(kind="metrics").values_list("data__step", flat=True))
        assert used.attempt == 2 and len(set(steps)) == len(steps)
    assert not kept()
    assert not any(list(storage.keys(checkpoints_of(run))) for run in runs)


def checkpoints_of(run: TrainingRun) -> str:
    return f"t/{run.tenant_id}/checkpoints/"


def note_first(first_seen: dict[str, int]) -> Any:
    """Keep the first step that each run's second child tells."""
    note = trainer.Told.note

    def noting(self: Any, event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            first_seen.setdefault(threading.current_thread().name, event["step"])
        note(self, event)

    return noting


def test_a_run_that_cannot_be_trained_fails_alone_and_says_why(acme: Party, globex: Party) -> None:
    runs = [make_run(acme, target_modules=["c_attn"]), make_run(globex)]
    execution.training_next()
    assert fresh(runs[0]).status == "failed"
    assert "'c_attn' is not one of down_proj" in runs[0].error
    told = runs[0].error_code, runs[0].error_param
    assert told == ("invalid_job", "hyperparameters.target_modules")
    assert fresh(runs[1]).status == "succeeded"


def test_a_run_that_lost_its_trainer_twice_is_by_itself(acme: Party, globex: Party) -> None:
    lost, other = make_run(acme), make_run(globex)
    with all_tenants(reason="test"):
        TrainingRun.objects.filter(pk=lost.pk).update(num_lost=2)
    execution.training_next()
    assert (fresh(lost).status, fresh(other).status) == ("succeeded", "queued")
    assert lost.attempts == 1


def test_a_checkpoint_whose_run_was_cancelled_while_it_waited_is_removed(acme: Party) -> None:
    run = make_run(acme)
    key = f"{checkpoints_of(run)}{run.pk}.safetensors"
    storage.put_bytes(key, b"x")
    with tenant_scope(run.tenant_id):
        TrainingRun.objects.update(attempts=1, stored_step=1)
        tasks.datasets_sweep()
        assert storage.object_size(key) == 1
        run_services.training_run_cancel(run=run)
    tasks.datasets_sweep()
    assert storage.object_size(key) is None


def test_a_paused_run_goes_on_from_its_state_while_the_batch_trains_another(
    acme: Party, globex: Party, night: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch still has the run's folder: the state comes from the store."""
    monkeypatch.setattr(events, "MAX_METRICS", ENDLESS)  # of each step
    first, second = make_run(acme, max_steps=ENDLESS), make_run(globex, max_steps=ENDLESS)
    night()
    wait_for(lambda: step_of(first) > 5 and step_of(second) > 0)
    with tenant_scope(first.tenant_id):
        pausing.training_run_pause(run=first)
        wait_for(lambda: fresh(first).status == "paused")
        reached = step_of(first)
        pausing.training_run_resume(run=first)
    night()
    with tenant_scope(first.tenant_id):
        told = first.events.filter(message__startswith="The job continues")
        wait_for(told.exists)
        assert told.get().data["step"] >= reached > 5
        metrics = first.events.filter(kind="metrics").values_list("data__step", flat=True)
        assert set(metrics) >= set(range(1, told.get().data["step"] + 1))
    assert (fresh(first).attempts, fresh(first).num_lost, fresh(second).attempts) == (2, 0, 1)
    for run in (first, second):
        with tenant_scope(run.tenant_id):
            run_services.training_run_cancel(run=run)
    wait_for(lambda: fresh(first).status == fresh(second).status == "cancelled")
