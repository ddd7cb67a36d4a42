"""Jobs join a batch while it trains others. What needs no process of its own runs in this one."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from contract.training.job import TrainJob
from engine.model.config import ModelConfig
from engine.training.memory import elements_of
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.worker.training.job_runs import (
    ROOT,
    Events,
    Heard,
    adapter_of,
    by_run,
    make_training,
    train_here,
    write_chats,
    write_job,
)
from worker.training import base
from worker.training.jobs import NamedJob, settings_of

Event = dict[str, Any]


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def write(folder: Path, base: Path, **hyper: Any) -> Path:
    folder.mkdir(parents=True)
    rows = write_chats(folder / "data.jsonl", f"world {folder.name}")
    return write_job(folder, base, rows, **hyper)


def write_all(folder: Path, base: Path) -> dict[str, Path]:
    """Two that begin, three that join them."""
    return {
        "long": write(folder / "long", base, max_steps=40, rank=4),
        "short": write(folder / "short", base, max_steps=3, rank=2, validation_share=0.4),
        "joined": write(folder / "joined", base, max_steps=6, rank=8, seed=4),
        "larger": write(folder / "larger", base, max_steps=4, rank=32, validation_share=0.4),
        "last": write(folder / "last", base, max_steps=2, target_modules=["q_proj"]),
    }


class Orders:
    """Orders to a trainer of this process, given as its events come."""

    def __init__(self, react: Callable[[Orders, Event], None]) -> None:
        self.events: list[Event] = []
        self._react = react
        self._given: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def emit(self, event: str, **fields: Any) -> None:
        told = json.loads(json.dumps({"event": event, **fields}))
        self.events.append(told)
        self._react(self, told)

    @property
    def num_done(self) -> int:
        return sum(event["event"] == "done" for event in self.events)

    def give(self, **order: Any) -> None:
        self._given.put(order)

    def read(self) -> Iterator[Event]:
        while True:  # an end would be that of the process
            yield self._given.get()


def train(
    state: Path,
    jobs: list[Path],
    react: Callable[[Orders, Event], None],
    runs: int = 8,
    worker: Path | None = None,
) -> tuple[int, Events]:
    """Exit code, events by run."""
    orders = Orders(react)
    changes = {"token_budget": 64, "max_runs": runs, "worker": worker, "join": True}
    work = make_training(jobs, cast(Heard, orders), state, **changes)
    threading.Thread(target=work.obey, args=(orders.read(),), daemon=True).start()
    code = work.run()
    return code, by_run(orders.events)


def is_step(event: Event, name: str, step: int) -> bool:
    run = Path(event["run"]).parent.name
    return (run, event["event"], event.get("step")) == (name, "progress", step)


def test_jobs_join_and_no_bit_of_anybody_changes(tmp_path: Path, tiny_base: Path) -> None:
    jobs, alone = (write_all(tmp_path / name, tiny_base) for name in ("jobs", "alone"))

    def react(orders: Orders, event: Event) -> None:
        if is_step(event, "long", 5):
            orders.give(add=str(jobs["joined"]))
        elif is_step(event, "joined", 2):  # larger than both that it began with
            orders.give(add=str(jobs["larger"]))
        elif event["event"] == "done" and orders.num_done == 4:
            orders.give(add=str(jobs["last"]))  # nobody else is trained any more
        elif event["event"] == "done" and orders.num_done == 5:
            orders.give(last=True)

    code, events = train(tmp_path / "state", [jobs["long"], jobs["short"]], react, runs=16)
    assert code == 0
    assert not [event for told in events.values() for event in told if event["event"] == "later"]
    for name, job in alone.items():
        _, wanted = train_here(tmp_path / "own", [job], budget=64)
        for field in ("step", "loss", "validation_loss", "best_loss", "final_loss"):
            assert [e.get(field) for e in events[name]] == [e.get(field) for e in wanted[name]]
        made = adapter_of(jobs[name])
        for tensor, value in adapter_of(job).items():
            assert torch.equal(made[tensor], value)
    order = list(events)
    assert order.index("larger") > order.index("joined")


def test_a_job_that_finds_no_room_is_in_the_next_batch(tmp_path: Path, tiny_base: Path) -> None:
    """And a cancelled one that joined ends, and a wrong one; the others do not notice."""
    first = write(tmp_path / "first", tiny_base, max_steps=30, rank=1, target_modules=["k_proj"])
    large = write(tmp_path / "large", tiny_base, max_steps=2, rank=64)
    wrong = write(tmp_path / "wrong", tiny_base, max_steps=2, eval_steps=1)
    ended = write(tmp_path / "ended", tiny_base, max_steps=10_000)

    def react(orders: Orders, event: Event) -> None:
        if is_step(event, "first", 2):
            for job in (large, wrong, ended):
                orders.give(add=str(job))
        elif is_step(event, "ended", 3):
            orders.give(cancel=str(ended))
            orders.give(last=True)

    code, events = train(tmp_path / "state", [first], react, runs=2)
    assert code == 2
    kinds = {name: [event["event"] for event in told] for name, told in events.items()}
    assert kinds["first"] == ["started", *["progress"] * 30, "done"]
    assert kinds["large"] == ["later", "started", "progress", "progress", "done"]
    assert "there is room for" in events["large"][0]["reason"]
    assert kinds["wrong"] == ["error"]
    assert events["wrong"][0]["field"] == "hyperparameters.eval_steps"
    assert kinds["ended"][-1] == "error" and len(kinds["ended"]) < 100


def test_room_for_those_that_may_join_is_bounded(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []
    for name, rank in (("one", 4), ("two", 8)):
        path = write(tmp_path / name, tiny_base, rank=rank)
        jobs.append(NamedJob(str(path), TrainJob.read(path)))

    def room(*, may_join: bool = True) -> int:
        opened = base.open_base(tiny_base, jobs, max_runs=10, may_join=may_join)
        return opened.trainer._spans.capacity

    own, with_more = room(may_join=False), room()
    config = ModelConfig.from_folder(tiny_base)
    sizes = [elements_of(config, settings_of(job.job.hyperparameters)) for job in jobs]
    assert (own, with_more) == (sum(sizes), sum(sizes) + 8 * max(sizes))
    for num_bytes, wanted in ((0, own), (1 << 40, with_more), (2 * 18 * (own + 5000), None)):
        monkeypatch.setattr(base.device, "host_bytes", lambda num_bytes=num_bytes: num_bytes)
        assert room() == wanted if wanted is not None else own < room() < with_more


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_the_process_holds_what_a_job_came_with_until_it_has_ended(
    tmp_path: Path, tiny_base: Path
) -> None:
    jobs = {name: write(tmp_path / name, tiny_base, max_steps=20_000) for name in ("a", "b")}
    ours, theirs = socket.socketpair()
    lock = tmp_path / "lock"
    lock.touch()
    command = ["--control", "--join", "--max-runs=4", "--checkpoints=-", str(jobs["a"])]
    with (
        ours,
        subprocess.Popen(
            [sys.executable, "-m", "worker.train", *command],
            cwd=ROOT,
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        theirs.close()
        assert process.stdout is not None

        def give(order: dict[str, Any], *locks: int) -> None:
            socket.send_fds(ours, [json.dumps(order).encode() + b"\n"], locks)

        seen = []
        for line in process.stdout:
            event = json.loads(line)
            name = Path(event["run"]).parent.name
            if event["event"] != "progress":
                seen.append((name, event["event"]))
            elif (name, event["step"]) == ("a", 2):
                give({"cancel": "somebody else"})
                with lock.open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX)
                    give({"add": str(jobs["b"]), "lock": True}, file.fileno())
            elif (name, event["step"]) == ("b", 3):
                assert is_locked(lock)
                give({"cancel": str(jobs["b"])})
            if seen[-1] == ("b", "error") and event["event"] == "progress":
                assert not is_locked(lock)
                give({"cancel": str(jobs["a"])})
                give({"last": True})
        assert seen == [("a", "started"), ("b", "started"), ("b", "error"), ("a", "error")]
    assert process.returncode == 2
