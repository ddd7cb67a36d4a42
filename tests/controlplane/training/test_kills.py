"""Random processes die at random moments; the run ends as one that nobody disturbed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psutil
import psycopg
import pytest
import redis
from django.db import connection

from controlplane.adapters.models import Adapter, AdapterVersion
from controlplane.events.outbox.models import OutboxEvent
from controlplane.infra import storage
from controlplane.training.models import Dataset, TrainingRun
from controlplane.training.runs import execution, lost_runs, sending
from controlplane.usage.models import TrainingUsage
from demo.stack import EmbeddedStack
from tests.controlplane.training.test_execution import make_run, progress_of
from tests.live import Process

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.long,
    pytest.mark.timeout(1800),
]
NUM_KILLS = 20
STEPS = 6000


class Victims:
    """The processes that one run needs, and how each is killed."""

    def __init__(self, stack: EmbeddedStack, folder: Path, bases: Path) -> None:
        self._stack, self._folder = stack, folder
        name = connection.settings_dict["NAME"]
        urls = {
            variable: urlunsplit(urlsplit(os.environ[variable])._replace(path=f"/{name}"))
            for variable in ("DATABASE_URL", "DATABASE_OWNER_URL")
        }
        self._url = urls["DATABASE_URL"]
        self._env = {
            **urls,
            "LORIKEET_BASE_MODEL_DIR": str(bases),
            "OMP_NUM_THREADS": "1",
        }
        self._names = (f"victim{number}@here" for number in itertools.count())
        self.celery = self._start()

    def _start(self) -> Process:
        argv = ["-m", "tests.controlplane.training.trainer_process", next(self._names)]
        return Process("celery", argv, self._env, self._folder / "celery.log")

    def kill_celery(self) -> None:
        self.celery.kill()
        self.celery = self._start()

    def kill_child(self) -> None:
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.celery.pid).children(recursive=True)
        return []

    def kill_backends(self) -> None:
        """Those of the trainer; the tests' own stay."""
        with psycopg.connect(self._url, autocommit=True) as own:
            own.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where pid <> all(%s)"
                " and datname = current_database() and usename = current_user",
                [[own.info.backend_pid, _backend_pid()]],
            )

    def restart_store(self) -> None:
        """Kill it, and start it again two seconds later."""
        store = self._stack.processes[0]
        assert store.pid is not None
        for process in [*psutil.Process(store.pid).children(recursive=True)]:
            process.kill()
        os.kill(store.pid, signal.SIGKILL)
        store.stop()
        time.sleep(2)
        store.start()

    def end(self) -> None:
        self.celery.end()
        wait_until(_store_answers, "the store comes back", 60)


def _backend_pid() -> int:
    connection.ensure_connection()
    return int(connection.connection.info.backend_pid)


def _store_answers() -> bool:
    try:
        storage.check_answers(2.0)
    except storage.STORAGE_ERRORS:
        return False
    return True


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 300) -> None:
    """Tick meanwhile, as beat does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"in time {what}"
        lost_runs.training_runs_reconcile()
        time.sleep(0.2)


@pytest.fixture
def victims(
    stack: EmbeddedStack, tmp_path: Path, base_models_dir: Path, adapter: Adapter, settings: Any
) -> Iterator[Victims]:
    with redis.Redis.from_url(settings.CELERY_BROKER_URL) as broker:
        broker.delete(sending.QUEUE)
    victims = Victims(stack, tmp_path, base_models_dir)
    yield victims
    victims.end()


def curve_of(run: TrainingRun) -> dict[int, float]:
    """Step -> loss, of the steps that are kept; each once."""
    rows = list(run.events.filter(kind="metrics").values_list("data__step", "data__train_loss"))
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def test_killed_20_times_it_makes_the_same_steps_and_ends_once(
    adapter: Adapter, dataset: Dataset, victims: Victims
) -> None:
    chance = random.Random(19)
    run = make_run(max_steps=STEPS, warmup_steps=0)
    kinds = [victims.kill_child, victims.kill_celery, victims.kill_backends, victims.restart_store]
    plan = [kind for kind in kinds for _ in range(NUM_KILLS // len(kinds))]
    chance.shuffle(plan)
    promised: list[tuple[int, int]] = []  # the attempt that was killed, and its last state
    for number, kill in enumerate(plan):
        before = progress_of(run).get("step", 0)
        if number % 3 == 0 and number:  # whatever it is at: also starting, or waiting for its lease
            time.sleep(chance.uniform(0, 5))
        else:
            more = chance.randrange(1, 60)
            wait_until(
                lambda more=more, before=before: (
                    progress_of(run).get("step", 0) > before + more or run.finished_at is not None
                ),
                f"the run comes further before kill {number}",
            )
        assert progress_of(run).get("step", 0) < STEPS, "it ended before it was killed so often"
        told = f"{run.status} before kill {number}, num_lost={run.num_lost}: {run.error}"
        assert run.finished_at is None, told
        promised.append((run.attempts, run.progress.get("saved_step", 0)))
        kill()
    wait_until(lambda: progress_of(run) is not None and run.finished_at is not None, "it ends", 900)

    assert (run.status, run.error) == ("succeeded", "")
    assert run.progress["step"] == STEPS and run.attempts > NUM_KILLS // 4
    assert run.events.filter(message="The job has successfully completed").count() == 1
    assert OutboxEvent.objects.filter(type="training_run.succeeded").count() == 1
    assert AdapterVersion.objects.exclude(status="rejected").get() == run.version
    resumed = dict(
        run.events.filter(message__startswith="The job continues").values_list("pk", "data__step")
    )
    steps = [step for _, step in sorted(resumed.items())]
    assert steps == sorted(steps) and len(steps) >= NUM_KILLS // 4
    for attempt, saved in promised:
        later = [step for step in steps if step >= saved]
        assert later or attempt == run.attempts, "a state that was saved was not gone on from"
    billed = sum(TrainingUsage.objects.values_list("trained_tokens", flat=True))
    assert billed == run.trained_tokens
    assert not list(storage.keys(f"t/{run.tenant_id}/checkpoints/"))

    calm = make_run(max_steps=STEPS, warmup_steps=0)
    execution.training_run_execute(calm.pk)
    calm.refresh_from_db()
    assert calm.status == "succeeded" and calm.version is not None and run.version is not None
    disturbed, undisturbed = curve_of(run), curve_of(calm)
    assert set(disturbed) <= set(undisturbed) and len(disturbed) > 0.9 * len(undisturbed)
    assert all(loss == pytest.approx(undisturbed[step]) for step, loss in disturbed.items())
    tensors = [
        storage.read_bytes(version.tensors_key, max_bytes=1 << 24)
        for version in (run.version, calm.version)
    ]
    assert tensors[0] == tensors[1]
