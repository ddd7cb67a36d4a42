"""Jobs that are validated, or begin from an adapter.

All in this process.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.training.model import TrainingModel
from tests.engine.training.scenes import peft_train
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.trainers import train_in_float32
from tests.worker.training.job_runs import (
    adapter_of,
    request_of,
    train_here,
    write_chats,
    write_job,
)
from worker.child import Stopped
from worker.training.disk import CheckpointFolder
from worker.training.loop import BatchTraining


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


def test_jobs_are_trained_as_peft_does_beside_their_validations(
    tmp_path: Path, tiny_base: Path
) -> None:
    first = write(tmp_path / "first", tiny_base, max_steps=8)
    train_here(tmp_path / "state", [first])
    others = write_chats(tmp_path / "others.jsonl", "moon", count=5)
    start = str(first.parent / "adapter" / "adapter_model.safetensors")

    jobs = {
        "share": write(tmp_path / "share", tiny_base, max_steps=11, validation_share=0.4),
        "often": write(
            tmp_path / "often", tiny_base, max_steps=6, eval_steps=1, validation_share=0.3, seed=3
        ),
        # What it learns is another answer, so that it gets worse and worse.
        "worse": write(
            tmp_path / "worse",
            tiny_base,
            {"validation_dataset": str(others)},
            max_steps=40,
            eval_steps=2,
            patience=3,
        ),
        "warm": write(tmp_path / "warm", tiny_base, {"warm_start": start}, max_steps=5),
        "both": write(
            tmp_path / "both",
            tiny_base,
            {"warm_start": start},
            max_steps=5,
            validation_share=0.4,
            batch_size=2,
            gradient_accumulation=2,
        ),
    }

    code, events = train_here(tmp_path / "state", list(jobs.values()), budget=64)
    assert code == 0
    assert list((tmp_path / "state").iterdir()) == []
    for name, job in jobs.items():
        peft = peft_train(tiny_base, request_of(job, tiny_base), tmp_path / "peft")
        told = [event["loss"] for event in events[name] if event["event"] == "progress"]
        # 1e-4, and half of the last digit that is told, on either side.
        assert told == pytest.approx(peft.losses[: len(told)], rel=1e-4, abs=2e-4)
        losses = {e["step"]: e["validation_loss"] for e in events[name] if "validation_loss" in e}
        if losses:
            best = min(losses, key=lambda step: losses[step])
            assert events[name][-1]["best_step"] == best
            assert events[name][-1]["best_loss"] == losses[best]
        if events[name][-1].get("best_step", len(told)) == len(peft.losses):  # not ended before
            for tensor, wanted in peft.adapter.items():
                assert float((adapter_of(job)[tensor] - wanted).abs().mean()) < 1e-4
    validated = {n: sum("validation_loss" in e for e in told) for n, told in events.items()}
    assert (validated["share"], validated["often"], validated["warm"]) == (11, 6, 0)
    ended = events["worse"][-1]
    assert events["worse"][-2]["step"] == ended["best_step"] + 6 < 40  # after three worse ones
    cold, warm = (events[name][1]["loss"] for name in ("share", "warm"))
    assert warm < cold - 1


def test_a_loss_that_is_no_number_ends_a_run_at_its_best_state(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the sixth step on; a state that is validated before is the result, one after is not."""
    backward = TrainingModel.backward
    count = 0

    def broken_backward(self: Any, *args: Any) -> Any:
        nonlocal count
        count += 1
        return backward(self, *args) * (math.nan if count > 5 else 1)

    validated = {"max_steps": 20, "validation_share": 0.4}
    four = write(tmp_path / "four", tiny_base, eval_steps=2, patience=None, **validated)
    code, wanted = train_here(tmp_path / "state", [four])
    assert code == 0
    monkeypatch.setattr(TrainingModel, "backward", broken_backward)
    job = write(tmp_path / "job", tiny_base, eval_steps=2, **validated)
    code, events = train_here(tmp_path / "state", [job])
    assert code == 0
    steps = [event for event in events["job"] if event["event"] == "progress"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5]
    assert steps[3]["validation_loss"] == wanted["four"][4]["validation_loss"]
    assert events["job"][-1]["best_step"] == 4
    assert all(bool(torch.isfinite(tensor).all()) for tensor in adapter_of(job).values())
    count = 0
    none = write(tmp_path / "none", tiny_base, eval_steps=50, **validated)
    code, events = train_here(tmp_path / "state", [none])
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
    made = adapter_of(job)
    assert all(torch.equal(made[name], value) for name, value in adapter_of(undisturbed).items())
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
