"""`worker.train` with many jobs, as its callers see it: job files in, events and folders out.

What needs no process of its own runs in this one.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from contract.training.job import TrainJob
from engine.model.config import ModelConfig
from engine.training.checkpoint import Checkpoint
from engine.training.model import TrainingModel
from engine.training.parameters import AdapterLayout
from engine.training.run import RunSettings
from engine.training.trainer import BatchTrainer
from tests.engine.training.scenes import peft_train
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.trainers import train_in_float32
from tests.worker.training.job_runs import (
    ROOT,
    Events,
    Heard,
    adapter_of,
    by_run,
    make_training,
    request_of,
    train_here,
    write_chats,
    write_job,
    write_rows,
)
from worker.child import is_disk_full
from worker.training import base, chat_data
from worker.training.base import open_base
from worker.training.disk import CheckpointFolder, SavedRun
from worker.training.jobs import NamedJob, kept_steps


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def write_jobs(folder: Path, base: Path, **hyperparameters: Any) -> dict[str, Path]:
    """Three jobs with little in common."""
    jobs = {}
    for name, changes in {
        "one": {"max_steps": 30, "rank": 4},
        "two": {"max_steps": 12, "rank": 1, "target_modules": ["q_proj", "down_proj"], "seed": 5},
        "three": {"epochs": 2.0, "batch_size": 5, "alpha": 3.5, "warmup_steps": 2},
    }.items():
        own = folder / name
        own.mkdir(parents=True)
        rows = write_chats(own / "data.jsonl", f"world {name}")
        jobs[name] = write_job(own, base, rows, **(changes | hyperparameters))
    return jobs


def add_job(folder: Path, base: Path, **hyperparameters: Any) -> Path:
    own = folder / "several"
    own.mkdir()
    return write_job(own, base, write_chats(own / "data.jsonl", "many"), **hyperparameters)


def start(checkpoints: Path, jobs: list[Path], *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "worker.train",
            *options,
            f"--checkpoints={checkpoints}",
            *map(str, jobs),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def two_folders(tmp_path: Path) -> tuple[Path, Path]:
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    return folders


def test_it_makes_what_peft_and_the_trainer_make(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_in_float32(monkeypatch)
    jobs = write_jobs(tmp_path, tiny_base, learning_rate=0.01)
    jobs["several"] = add_job(tmp_path, tiny_base, gradient_accumulation=3, batch_size=2)
    code, events = train_here(tmp_path / "state", list(jobs.values()), budget=64)
    assert code == 0
    assert list((tmp_path / "state").iterdir()) == []
    for name, job in jobs.items():
        asked = request_of(job, tiny_base)
        peft = peft_train(tiny_base, asked, tmp_path / "peft")
        started, *progress, done = events[name]
        assert [event["step"] for event in progress] == list(range(1, started["steps"] + 1))
        # Half of the last digit that is told, and rounding that grows from step to step.
        told = [event["loss"] for event in progress]
        assert told == pytest.approx(peft.losses, rel=1e-3, abs=2e-4)
        rates = [event["learning_rate"] for event in progress]
        assert rates == pytest.approx([*peft.rates], rel=1e-9)
        last = peft.losses[-max(1, len(told) // 10) :]
        assert done["final_loss"] == pytest.approx(sum(last) / len(last), rel=1e-3, abs=1e-3)
        made = adapter_of(job)
        assert made.keys() == peft.adapter.keys()
        for tensor, wanted in peft.adapter.items():
            assert (made[tensor].shape, made[tensor].dtype) == (wanted.shape, wanted.dtype)
            assert float((made[tensor] - wanted).abs().mean()) < 1e-4


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
    assert "line 1 has neither `messages`" in two["message"]
    assert "learning_rate" in three["message"]


def test_a_row_that_breaks_code_of_ours_ends_its_own_job_alone(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = write_jobs(tmp_path, tiny_base, max_steps=2)
    write_chats(jobs["two"].parent / "data.jsonl", "breaks it")
    write_chats(jobs["three"].parent / "data.jsonl", "is too deep")
    encode_row = chat_data.encode_row

    def encode(codec: Any, row: Any, **options: Any) -> Any:
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


def test_a_run_that_diverges_says_so(tmp_path: Path, tiny_base: Path) -> None:
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


def test_a_base_that_the_engine_does_not_know_is_refused(tmp_path: Path, tiny_base: Path) -> None:
    """It could not serve the adapter. Jobs of other bases are trained."""
    other = tmp_path / "base"
    shutil.copytree(tiny_base, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (other / "config.json").write_text(json.dumps(config))
    jobs = write_jobs(tmp_path, tiny_base, max_steps=2)
    fields = json.loads(jobs["two"].read_text())
    jobs["two"].write_text(json.dumps(fields | {"base_model_dir": str(other)}))
    fields = json.loads(jobs["three"].read_text())
    strange = str(tiny_base / "model.safetensors")
    jobs["three"].write_text(json.dumps(fields | {"warm_start": strange}))
    code, events = train_here(tmp_path / "state", list(jobs.values()))
    assert code == 2
    [error] = events["three"]
    assert (error["event"], error["field"]) == ("error", "warm_start")
    [error] = events["two"]
    assert error["field"] == "base_model_dir" and "dynamic" in error["message"]
    assert [event["event"] for event in events["one"]] == [
        "started",
        "progress",
        "progress",
        "done",
    ]


def test_adapters_on_the_way_are_kept_and_are_those_of_their_steps(
    tmp_path: Path, tiny_base: Path
) -> None:
    """Also by a process that continues: those that are there stay."""
    hyper = {"max_steps": 12, "checkpoints": 3, "validation_share": 0.4, "eval_steps": 3}
    job = write_jobs(tmp_path, tiny_base, **hyper)["one"]
    kept = tmp_path / "kept"
    job.write_text(json.dumps(json.loads(job.read_text()) | {"kept_dir": str(kept)}))
    (kept / "6").mkdir(parents=True)
    code, events = train_here(tmp_path / "state", [job])
    assert code == 0
    told = {event["step"]: event for event in events["one"] if event["event"] == "progress"}
    assert sorted(int(folder.name) for folder in kept.iterdir()) == [3, 6, 9]
    assert not list((kept / "6").iterdir())
    for step in (3, 9):
        metrics = json.loads((kept / str(step) / "metrics.json").read_text())
        assert metrics == {
            "step": step,
            "train_loss": told[step]["loss"],
            "full_valid_loss": told[step]["validation_loss"],
        }
    # A training of as many steps, under the same schedule, ends with that adapter.
    saved: dict[int, dict[str, torch.Tensor]] = {}
    again = write_jobs(tmp_path / "again", tiny_base, **hyper | {"checkpoints": 0})["one"]
    layout = AdapterLayout(ModelConfig.from_folder(tiny_base), RunSettings(rank=4))
    step = BatchTrainer.step

    def look(self: BatchTrainer) -> Any:
        found = step(self)
        state = self.checkpoint(str(again))
        if state is not None:
            saved[state.step] = layout.tensors(state.tensors["master"].clone())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchTrainer, "step", look)
        train_here(tmp_path / "state", [again])
    for number in (3, 9):
        tensors = load_file(kept / str(number) / "adapter_model.safetensors")
        assert all(torch.equal(saved[number][name], value) for name, value in tensors.items())


def test_an_adapter_that_cannot_be_kept_is_warned_of_and_the_training_ends_well(
    tmp_path: Path, tiny_base: Path
) -> None:
    job = write_jobs(tmp_path, tiny_base, max_steps=4, checkpoints=1)["one"]
    (tmp_path / "kept").write_text("no folder")
    fields = {"kept_dir": str(tmp_path / "kept")}
    job.write_text(json.dumps(json.loads(job.read_text()) | fields))
    code, events = train_here(tmp_path / "state", [job])
    [warning] = [event for event in events["one"] if event["event"] == "warning"]
    assert warning["message"].startswith("the checkpoint after step 2 could not be kept: ")
    assert (code, events["one"][-1]["event"]) == (0, "done")


def test_a_full_disk_is_said_once_and_the_training_continues(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(CheckpointFolder, "save", full)
    job = write_jobs(tmp_path, tiny_base, max_steps=6)["one"]
    log = Heard()
    assert make_training([job], log, tmp_path / "state", checkpoint_s=0.0).run() == 0
    [warning] = log.of("warning")
    assert warning["message"] == "the run's state could not be saved: No space left on device"
    assert not log.of("saved") and log.of("done")


def test_a_full_disk_is_known_by_its_error() -> None:
    """As Python says it, and the library that writes tensors."""
    assert is_disk_full(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert is_disk_full(SafetensorError("I/O error: No space left on device (os error 28)"))
    assert not is_disk_full(ValueError("something else"))


def test_on_a_cpu_activations_are_computed_again_if_a_job_asks_for_it(
    tmp_path: Path, tiny_base: Path
) -> None:
    for name, is_asked in (("no", False), ("yes", True)):
        (tmp_path / name).mkdir()
        paths = write_jobs(tmp_path / name, tiny_base, gradient_checkpointing=is_asked)
        jobs = [NamedJob(str(path), TrainJob.read(path)) for path in paths.values()]
        assert open_base(tiny_base, jobs).model.num_recomputed == (2 if is_asked else 0)


@pytest.mark.parametrize(
    ("steps", "number", "kept"), [(6, 2, {2, 4}), (2, 10, {1}), (1, 3, set()), (9, 0, set())]
)
def test_the_steps_that_are_kept(steps: int, number: int, kept: set[int]) -> None:
    assert kept_steps(steps, number) == kept


def test_a_run_that_the_gpu_has_no_room_for_names_what_takes_less(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest; the others are trained without it."""
    jobs = write_jobs(tmp_path, tiny_base, max_steps=2)
    backward = TrainingModel.backward

    def full(self: Any, batch: Any, *args: Any) -> Any:
        if len(opened) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return backward(self, batch, *args)

    opened: list[Any] = []
    monkeypatch.setattr(base, "open_base", lambda *a, **k: opened.append(a) or open_base(*a, **k))
    monkeypatch.setattr(TrainingModel, "backward", full)
    code, events = train_here(tmp_path / "state", list(jobs.values()))
    ends = {name: told[-1]["event"] for name, told in events.items()}
    assert (code, ends) == (2, {"one": "error", "two": "done", "three": "done"})
    assert "smaller max_length" in events["one"][-1]["message"]
