"""Jobs that are validated, or begin from an adapter: as `worker.train` does them.

All in this process.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.training import TrainJob
from engine.training.model import TrainingModel
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.trainers import train_in_float32
from tests.worker.test_train_many import Heard, adapter_of, train_here, write_chats
from tests.worker.training.test_train import write_job
from worker.batch_training.disk import CheckpointFolder
from worker.batch_training.loop import BatchTraining
from worker.train import EventLog, Stopped, train
from worker.training.loop import AnswerTrainer

#: Named by what is told at each step.
FIGURES = ("loss", "learning_rate", "validation_loss", "best_loss", "final_loss")
COUNTS = ("rows", "tokens", "validation_rows", "leaked_rows", "steps", "step", "best_step", "event")


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    train_in_float32(monkeypatch)


def write(folder: Path, base: Path, job: dict[str, Any] | None = None, **hyper: Any) -> Path:
    folder.mkdir(parents=True)
    rows = write_chats(folder / "data.jsonl", "world")
    # So slowly that rounding does not grow from step to step.
    path = write_job(folder, base, rows, **{"learning_rate": 0.01, **hyper})
    path.write_text(json.dumps(json.loads(path.read_text()) | (job or {})))
    return path


def alone(job: Path) -> list[dict[str, Any]]:
    heard = Heard()
    train(TrainJob.read(job), cast(EventLog, heard))
    return heard.events


def check_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """The same events, with the same fields and counts, and losses that differ by rounding."""
    assert [list(event) for event in ours] == [list(event) for event in theirs]
    for own, their in zip(ours, theirs, strict=True):
        for name in COUNTS:
            assert own.get(name) == their.get(name)
        for name in FIGURES:
            # 1e-4, and half of the last digit that is told, on either side.
            if name in their:
                assert own[name] == pytest.approx(their[name], rel=1e-4, abs=2e-4)


def check_same_adapter(ours: Path, theirs: Path) -> None:
    made = adapter_of(ours)
    for name, wanted in adapter_of(theirs).items():
        assert (made[name].shape, made[name].dtype) == (wanted.shape, wanted.dtype)
        assert float((made[name] - wanted).abs().mean()) < 1e-4


def test_jobs_are_validated_and_begin_as_alone(tmp_path: Path, tiny_base: Path) -> None:
    first = write(tmp_path / "first", tiny_base, max_steps=8)
    alone(first)
    others = write_chats(tmp_path / "others.jsonl", "moon", count=5)
    start = str(first.parent / "adapter" / "adapter_model.safetensors")

    def write_all(folder: Path) -> dict[str, Path]:
        return {
            "share": write(folder / "share", tiny_base, max_steps=11, validation_share=0.4),
            "often": write(
                folder / "often", tiny_base, max_steps=6, eval_steps=1, validation_share=0.3, seed=3
            ),
            # What it learns is another answer, so that it gets worse and worse.
            "worse": write(
                folder / "worse",
                tiny_base,
                {"validation_dataset": str(others)},
                max_steps=40,
                eval_steps=2,
                patience=3,
            ),
            "warm": write(folder / "warm", tiny_base, {"warm_start": start}, max_steps=5),
            "both": write(
                folder / "both",
                tiny_base,
                {"warm_start": start},
                max_steps=5,
                validation_share=0.4,
                batch_size=2,
                gradient_accumulation=2,
            ),
        }

    jobs, by_themselves = write_all(tmp_path / "jobs"), write_all(tmp_path / "alone")
    code, events = train_here(tmp_path / "state", list(jobs.values()), budget=64)
    assert code == 0
    assert list((tmp_path / "state").iterdir()) == []
    for name, job in jobs.items():
        check_same(events[name], alone(by_themselves[name]))
        check_same_adapter(job, by_themselves[name])
    validated = {n: sum("validation_loss" in e for e in told) for n, told in events.items()}
    assert (validated["share"], validated["often"], validated["warm"]) == (11, 6, 0)
    ended = events["worse"][-1]
    assert events["worse"][-2]["step"] == ended["best_step"] + 6 < 40  # after three worse ones
    cold, warm = (events[name][1]["loss"] for name in ("share", "warm"))
    assert warm < cold - 1


def test_a_loss_that_is_no_number_ends_both_at_the_best_state(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the sixth step on; a state that is validated before is the result, one after is not."""
    compute_loss, backward = AnswerTrainer.compute_loss, TrainingModel.backward
    count = 0

    def broken_loss(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += model.training
        loss = compute_loss(self, model, *args, **kwargs)
        return loss * math.nan if model.training and count > 5 else loss

    def broken_backward(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        return backward(self, *args) * (math.nan if count > 5 else 1)

    monkeypatch.setattr(AnswerTrainer, "compute_loss", broken_loss)
    monkeypatch.setattr(TrainingModel, "backward", broken_backward)
    jobs = {}
    for name in ("ours", "theirs", "none"):
        steps = 50 if name == "none" else 2
        jobs[name] = write(
            tmp_path / name, tiny_base, max_steps=20, validation_share=0.4, eval_steps=steps
        )
    theirs, count = alone(jobs["theirs"]), 0
    code, events = train_here(tmp_path / "state", [jobs["ours"]])
    assert code == 0
    check_same(events["ours"], theirs)
    check_same_adapter(jobs["ours"], jobs["theirs"])
    assert [e["step"] for e in theirs if e["event"] == "progress"] == [1, 2, 3, 4, 5]
    count = 0
    code, events = train_here(tmp_path / "state", [jobs["none"]])
    assert (code, events["none"][-1]["event"]) == (2, "error")
    assert "not a number any more at step 6" in events["none"][-1]["message"]


@pytest.mark.parametrize("change", ["shape", "name", "nan", "rank", "no file"])
def test_an_adapter_that_is_not_the_jobs_is_refused(
    tmp_path: Path, tiny_base: Path, change: str
) -> None:
    start = write(tmp_path / "first", tiny_base, max_steps=1)
    code, _ = train_here(tmp_path / "state", [start])
    assert code == 0
    path = start.parent / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    if change == "shape":
        tensors[name] = torch.zeros(1 << 20)  # as many as one likes: they are not read
    elif change == "name":
        tensors["strange"] = tensors.pop(name)
    elif change == "nan":
        tensors[name][0, 0] = math.nan
    save_file(tensors, path)
    if change == "no file":
        path.write_bytes(path.read_bytes()[:-7])
    rank = 8 if change == "rank" else 4
    job = write(tmp_path / "job", tiny_base, {"warm_start": str(path)}, rank=rank)
    good = write(tmp_path / "good", tiny_base, max_steps=1)
    code, events = train_here(tmp_path / "state", [job, good])
    assert code == 2
    [error] = events["job"]
    assert (error["event"], error["field"]) == ("error", "warm_start")
    wanted = {
        "shape": "does not fit",
        "name": "has other tensors",
        "nan": "is not finite",
        "rank": "does not fit",
        "no file": "cannot be read",
    }[change]
    assert wanted in error["message"]
    assert events["good"][-1]["event"] == "done"


def test_what_a_validation_has_found_outlives_the_process(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after each step anew; nothing that was found is lost or said twice."""
    hyper = {"max_steps": 6, "validation_share": 0.4, "eval_steps": 2, "seed": 1}
    undisturbed = write(tmp_path / "undisturbed", tiny_base, **hyper)
    job, state = write(tmp_path / "job", tiny_base, **hyper), tmp_path / "state"
    _, wanted = train_here(tmp_path / "other", [undisturbed])
    told: list[dict[str, Any]] = []
    while not told or told[-1]["event"] != "done":
        before = len(told)
        told += stopped_after_a_step(state, job)
        assert len(told) > before
    assert [event["event"] for event in told].count("started") == 6
    assert "error" not in [event["event"] for event in told]
    times = ("tokens_per_s", "eta_s", "memory_bytes", "seconds", "output", "run")

    def steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        shown = [event for event in events if event["event"] in ("progress", "done")]
        return [{k: v for k, v in event.items() if k not in times} for event in shown]

    assert steps(told) == steps(wanted["undisturbed"])
    check_same_adapter(job, undisturbed)
    curve = [[e["step"], e["validation_loss"]] for e in told if "validation_loss" in e]
    last = [event for event in told if event["event"] == "started"][-1]
    assert last["validation_losses"] == curve[: len(last["validation_losses"])]
    assert len(last["validation_losses"]) >= 2
    assert CheckpointFolder(state).load(str(job)) is None


def stopped_after_a_step(state: Path, job: Path) -> list[dict[str, Any]]:
    """What is said until one step was said; then it is stopped as by SIGTERM."""
    heard: list[dict[str, Any]] = []
    report = BatchTraining._report_progress

    def report_and_stop(self: BatchTraining, *args: Any) -> None:
        report(self, *args)
        self.stop()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(BatchTraining, "_report_progress", report_and_stop)
        train_here(state, [job], heard=heard)
    return heard
