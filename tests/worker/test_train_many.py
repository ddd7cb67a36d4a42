"""`worker.train_many` as its callers see it: job files in, events and folders out.

What needs no process of its own runs in this one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.training import TrainJob
from engine.training.checkpoint import Checkpoint
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.trainers import train_in_float32
from tests.worker.training.test_train import ROOT, write_job, write_rows
from worker.batch_training.disk import CheckpointFolder, SavedRun
from worker.train import EventLog, train
from worker.train_many import TrainMany
from worker.training import chat_data

Events = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def write_chats(path: Path, word: str, count: int = 12) -> Path:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"hello {i}" * (i % 5 + 1)},
                {"role": "assistant", "content": word},
            ]
        }
        for i in range(count)
    ]
    return write_rows(path, chats)


def write_jobs(folder: Path, base: Path, **hyperparameters: Any) -> dict[str, Path]:
    """Three jobs with little in common."""
    jobs = {}
    for name, changes in {
        "one": {"max_steps": 30, "rank": 4},
        "two": {"max_steps": 12, "rank": 1, "target_modules": ["q_proj", "down_proj"], "seed": 5},
        "three": {"epochs": 2.0, "batch_size": 5, "alpha": 3.5, "warmup_steps": 2},
    }.items():
        own = folder / name
        own.mkdir()
        rows = write_chats(own / "data.jsonl", f"world {name}")
        jobs[name] = write_job(own, base, rows, **(changes | hyperparameters))
    return jobs


class Heard:
    """An event log that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append(json.loads(json.dumps({"event": event, **fields})))


def start(checkpoints: Path, jobs: list[Path], *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "worker.train_many", *options, str(checkpoints), *map(str, jobs)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def by_run(events: list[dict[str, Any]]) -> Events:
    found: Events = defaultdict(list)
    for event in events:
        found[Path(event.pop("run")).parent.name].append(event)
    return found


def train_here(
    checkpoints: Path,
    jobs: list[Path],
    budget: int | None = None,
    runs: int | None = None,
    worker: Path | None = None,
    heard: list[dict[str, Any]] | None = None,
) -> tuple[int, Events]:
    """Exit code, events by run; `heard` gets the events as they come."""
    log = Heard()
    log.events = [] if heard is None else heard
    options = argparse.Namespace(
        checkpoints=checkpoints,
        jobs=[str(job) for job in jobs],
        token_budget=budget,
        max_runs=runs,
        checkpoint_s=60.0,
        worker=worker,
        join=False,
    )
    code = TrainMany(options, cast(EventLog, log)).run()
    return code, by_run(log.events)


def adapter_of(job: Path) -> dict[str, torch.Tensor]:
    return load_file(job.parent / "adapter" / "adapter_model.safetensors")


def two_folders(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    return folders


def test_it_says_and_makes_what_the_present_trainer_does(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_in_float32(monkeypatch)
    together, alone = (
        write_jobs(folder, tiny_base, learning_rate=0.01) for folder in two_folders(tmp_path)
    )
    code, events = train_here(tmp_path / "state", list(together.values()), budget=64)
    assert code == 0
    assert list((tmp_path / "state").iterdir()) == []
    for name, job in together.items():
        present = Heard()
        train(TrainJob.read(alone[name]), cast(EventLog, present))
        assert [list(event) for event in events[name]] == [list(each) for each in present.events]
        for ours, theirs in zip(events[name], present.events, strict=True):
            for field in ("rows", "tokens", "truncated_rows", "steps", "step", "event"):
                assert ours.get(field) == theirs.get(field)
            for field in ("learning_rate", "loss", "final_loss"):
                if field in theirs:
                    assert ours[field] == pytest.approx(theirs[field], rel=1e-3, abs=1e-3)
        folder, own = alone[name].parent / "adapter", job.parent / "adapter"
        assert {file.name for file in folder.iterdir()} == {file.name for file in own.iterdir()}
        config = "adapter_config.json"
        assert (own / config).read_text() == (folder / config).read_text()
        for tensor, wanted in adapter_of(alone[name]).items():
            made = adapter_of(job)[tensor]
            assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
            assert float((made - wanted).abs().mean()) < 1e-4


def until(state: Path, jobs: list[Path], number: int, sent: signal.Signals) -> tuple[int, Events]:
    """Exit code, and the events of a process that gets a signal after a number of them."""
    with start(state, jobs, "--checkpoint-s=0") as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if len(lines) == number:
                process.send_signal(sent)
    return process.returncode, by_run([json.loads(line) for line in lines if line.endswith("}\n")])


def test_killed_at_any_moment_it_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, tiny_base: Path
) -> None:
    killed, undisturbed = (
        write_jobs(folder, tiny_base, max_steps=16) for folder in two_folders(tmp_path)
    )
    code, wanted = train_here(tmp_path / "other", list(undisturbed.values()))
    assert code == 0

    state, jobs = tmp_path / "state", list(killed.values())
    code, first = until(state, jobs, 15, signal.SIGKILL)
    assert code == -signal.SIGKILL
    code, second = until(state, jobs, 12, signal.SIGTERM)
    assert code == 143
    folder = CheckpointFolder(state)
    for name, job in killed.items():  # it stopped after everything was saved
        saved = folder.load(str(job))
        if second[name] and second[name][-1]["event"] == "progress":
            assert saved is not None
            assert saved.checkpoint.step == len(saved.losses) == second[name][-1]["step"]
    code, third = train_here(state, jobs)
    assert code == 0 and list(state.iterdir()) == []

    assert any(event.get("resumed_step", 0) > 1 for event in second["one"])
    assert any(event.get("resumed_step", 0) > 1 for event in third["one"])
    for name, job in killed.items():
        seen = [*first[name], *second[name], *third[name]]
        assert [event["event"] for event in seen].count("done") == 1
        assert seen[-1]["event"] == "done"
        for field in ("final_loss", "trained_tokens"):
            assert seen[-1][field] == wanted[name][-1][field]
        expected = {e["step"]: e["loss"] for e in wanted[name] if e["event"] == "progress"}
        steps = [event for event in seen if event["event"] == "progress"]
        assert {event["step"] for event in steps} == set(range(1, 17))
        assert all(event["loss"] == expected[event["step"]] for event in steps)
        made = adapter_of(job)
        for tensor, value in adapter_of(undisturbed[name]).items():
            assert torch.equal(made[tensor], value)


@pytest.mark.parametrize("damage", ["another job's", "half a file"])
def test_a_checkpoint_that_is_not_the_jobs_is_left_alone(
    tmp_path: Path, tiny_base: Path, damage: str
) -> None:
    job = write_jobs(tmp_path, tiny_base, max_steps=2)["one"]
    folder = CheckpointFolder(tmp_path / "state")
    tensors = {name: torch.zeros(1024) for name in ("master", "first_moment", "second_moment")}
    folder.save(str(job), SavedRun(Checkpoint(tensors, {"version": 1, "run_id": "other"}), [0.0]))
    [file] = (tmp_path / "state").glob("*/*")
    if damage == "half a file":
        file.write_bytes(file.read_bytes()[:100])
    code, events = train_here(tmp_path / "state", [job])
    assert code == 0
    assert [event["event"] for event in events["one"]] == ["started", *["progress"] * 2, "done"]
    assert "resumed_step" not in events["one"][0]


def test_what_was_done_before_the_process_ended_is_said_again(
    tmp_path: Path, tiny_base: Path
) -> None:
    jobs = write_jobs(tmp_path, tiny_base, max_steps=2)
    first = list(jobs.values())[:1]
    _, events = train_here(tmp_path / "state", first)
    done = {name: value for name, value in events["one"][-1].items() if name != "event"}
    CheckpointFolder(tmp_path / "state").save_result(str(first[0]), done)  # it never got away
    code, again = train_here(tmp_path / "state", first)
    assert (code, again["one"]) == (0, events["one"][-1:])
    code, again = train_here(tmp_path / "state", first)
    assert (code, again["one"][0]["event"]) == (2, "error")
    assert "it exists already" in again["one"][0]["message"]


def test_a_wrong_job_ends_alone(tmp_path: Path, tiny_base: Path) -> None:
    jobs = write_jobs(tmp_path, tiny_base, max_steps=2)
    write_rows(jobs["two"].parent / "data.jsonl", [{"question": "a"}])
    fields = json.loads(jobs["three"].read_text())
    fields["hyperparameters"]["learning_rate"] = -1
    jobs["three"].write_text(json.dumps(fields))
    code, events = train_here(tmp_path / "state", list(jobs.values()))
    assert code == 2
    assert events["two"][-1]["field"] == "dataset"
    assert events["three"][-1]["field"] == "hyperparameters.learning_rate"
    assert events["one"][-1]["event"] == "done"
    [two], [three] = events["two"], events["three"]
    assert two["event"] == three["event"] == "error"
    assert "line 1: messages" in two["message"]
    assert "learning_rate" in three["message"]


def test_a_row_that_breaks_code_of_ours_ends_its_own_job_alone(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = write_jobs(tmp_path, tiny_base, max_steps=2)
    write_chats(jobs["two"].parent / "data.jsonl", "breaks it")
    write_chats(jobs["three"].parent / "data.jsonl", "is too deep")
    encode_row = chat_data.encode_row

    def encode(codec: Any, row: Any) -> Any:
        if "breaks it" in str(row):
            raise KeyError("a defect")
        if "is too deep" in str(row):
            raise RecursionError
        return encode_row(codec, row)

    monkeypatch.setattr(chat_data, "encode_row", encode)
    code, events = train_here(tmp_path / "state", list(jobs.values()))
    assert (code, events["one"][-1]["event"]) == (2, "done")
    [two], [three] = events["two"], events["three"]
    assert (two["event"], two["field"]) == (three["event"], three["field"]) == ("error", "dataset")
    assert "the trainer's log says why" in two["message"]
    assert three["message"] == "line 1: it is nested too deeply"


def test_a_run_that_diverges_says_so_as_the_present_trainer_does(
    tmp_path: Path, tiny_base: Path
) -> None:
    broken = tmp_path / "base"
    shutil.copytree(tiny_base, broken)
    tensors = load_file(tiny_base / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    job = write_jobs(tmp_path, broken, max_steps=2)["one"]
    code, events = train_here(tmp_path / "state", [job])
    assert code == 2
    assert [event["event"] for event in events["one"]] == ["started", "error"]
    message = "hyperparameters.learning_rate: the loss is not a number any more at step 1: lower it"
    assert events["one"][-1]["message"] == message
    assert not (job.parent / "adapter").exists() and list((tmp_path / "state").iterdir()) == []


def test_what_the_batch_does_not_do_goes_to_the_present_trainer(
    tmp_path: Path, tiny_base: Path
) -> None:
    other = tmp_path / "base"
    shutil.copytree(tiny_base, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (other / "config.json").write_text(json.dumps(config))
    jobs = write_jobs(tmp_path, tiny_base, max_steps=2)
    fields = json.loads(jobs["two"].read_text())
    jobs["two"].write_text(json.dumps(fields | {"base_model_dir": str(other)}))
    fields = json.loads(jobs["three"].read_text())
    fields["hyperparameters"]["checkpoints"] = 1
    strange = str(tiny_base / "model.safetensors")
    jobs["three"].write_text(json.dumps(fields | {"warm_start": strange}))
    code, events = train_here(tmp_path / "state", list(jobs.values()))
    assert code == 2
    alone, error = events["three"]
    assert alone["event"] == "alone" and alone["reason"].startswith("checkpoints: ")
    assert (error["event"], error["field"]) == ("error", "warm_start")
    alone, *rest = events["two"]
    assert alone["event"] == "alone" and "dynamic" in alone["reason"]
    assert [event["event"] for event in rest] == ["started", "progress", "progress", "done"]
    assert [event["event"] for event in events["one"]] == [
        "started",
        "progress",
        "progress",
        "done",
    ]
