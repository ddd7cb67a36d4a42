"""A training that is ended at any moment goes on, and ends as it would have undisturbed."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from contract.training import TrainJob
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.worker.training.test_train import start, write_job, write_rows
from worker.train import EventLog, Stopped, StopSignals, is_disk_full, train
from worker.training import checkpoints
from worker.training.checkpoints import SavedTraining
from worker.training.kept_adapters import kept_steps

STEPS = 20


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


class Log(EventLog):
    """Keeps the events; `at_step` is done when that step is reported."""

    def __init__(self, **at: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self._at = {int(name[4:]): do for name, do in at.items()}

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})
        if event == "progress" and fields["step"] in self._at:
            self._at[fields["step"]]()

    def steps(self) -> list[int]:
        return [event["step"] for event in self.events if event["event"] == "progress"]

    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events if event["event"] == "progress"]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def job_in(folder: Path, base: Path, *, every_s: float = 1e9, **hyper: Any) -> Path:
    """Two epochs and a bit of rows of many lengths; some of them validate."""
    folder.mkdir()
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"hello {i}" * (i % 7 + 1)},
                {"role": "assistant", "content": f"world {i}"},
            ]
        }
        for i in range(34)
    ]
    hyper = {"max_steps": STEPS, "validation_share": 0.2, "eval_steps": 3} | hyper
    path = write_job(folder, base, write_rows(folder / "data.jsonl", rows), **hyper)
    more = {"checkpoint": str(folder / "state.safetensors"), "checkpoint_s": every_s}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return path


def run_here(path: Path, log: Log, signals: StopSignals | None = None) -> Log:
    train(TrainJob.read(path), log, signals)
    return log


def adapter(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((path.parent / "adapter").iterdir())]


def test_stopped_after_any_step_it_makes_the_same_steps_and_the_same_bytes(
    tmp_path: Path, tiny_base: Path
) -> None:
    """Also at the end of an epoch, and when the reader of the events is gone."""
    whole = run_here(path := job_in(tmp_path / "whole", tiny_base), Log())
    first = whole.of("started")[0]
    per_epoch = -(-first["examples"] // 4)
    assert 2 * per_epoch < STEPS and whole.steps() == list(range(1, STEPS + 1))
    part = job_in(tmp_path / "part", tiny_base)
    made: list[Log] = []
    for step in (1, per_epoch, per_epoch + 2):
        signals = StopSignals()
        log = Log(**{f"step{step}": lambda signals=signals: signals(signal.SIGTERM, None)})
        with pytest.raises(Stopped):
            run_here(part, log, signals)
        made.append(log)

    def gone() -> None:
        raise BrokenPipeError

    made.append(Log(**{f"step{STEPS - 3}": gone}))
    with pytest.raises(BrokenPipeError):
        run_here(part, made[-1])
    with pytest.raises(BrokenPipeError):  # after the last step there is nothing to go on with
        run_here(part, Log(**{f"step{STEPS}": gone}))
    made.append(run_here(part, Log()))
    assert [log.of("started")[0].get("resumed_step", 0) for log in made] == [
        *(0, 1, per_epoch, per_epoch + 2),
        STEPS - 3,
    ]
    assert [step for log in made for step in log.steps()] == whole.steps()
    assert [loss for log in made for loss in log.losses()] == whole.losses()
    curve = made[-1].of("started")[0]["validation_losses"]
    assert [step for step, _ in curve] == list(range(3, STEPS - 3, 3))
    ends = [log.of("done")[0] for log in (whole, made[-1])]
    same = ("final_loss", "trained_tokens", "best_step", "best_loss")
    assert [ends[0][name] for name in same] == [ends[1][name] for name in same]
    assert adapter(part) == adapter(path)


@pytest.mark.long
def test_killed_it_repeats_what_came_after_its_last_state(tmp_path: Path, tiny_base: Path) -> None:
    path = job_in(tmp_path / "run", tiny_base, every_s=0.0, max_steps=20_000)
    seen: list[dict[str, Any]] = []
    with start(path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            seen.append(json.loads(line))
            if seen[-1]["event"] == "saved" and seen[-1]["step"] > 20:
                os.kill(process.pid, signal.SIGKILL)
                break
    saved = SavedTraining.read(path.parent / "state.safetensors")
    assert saved is not None and saved.step >= seen[-1]["step"]
    told = [event for event in seen if event["event"] == "progress"]
    assert saved.state["losses"][:5] == pytest.approx(
        [event["loss"] for event in told][:5], abs=1e-4
    )


def test_a_state_that_is_no_number_does_not_replace_the_last_good_one(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_in(tmp_path / "run", tiny_base)
    signals = StopSignals()
    with pytest.raises(Stopped):
        run_here(path, Log(step4=lambda: signals(signal.SIGTERM, None)), signals)
    state = path.parent / "state.safetensors"
    good = state.read_bytes()
    monkeypatch.setattr(SavedTraining, "is_finite", False)
    signals = StopSignals()
    with pytest.raises(Stopped):
        run_here(path, Log(step7=lambda: signals(signal.SIGTERM, None)), signals)
    assert state.read_bytes() == good
    tensors = load_file(state)
    monkeypatch.undo()
    assert SavedTraining(tensors, {}).is_finite
    name = next(name for name in tensors if name.startswith("adapter."))
    tensors[name][0, 0] = float("inf")
    assert not SavedTraining(tensors, {}).is_finite


@pytest.mark.parametrize("damage", ["cut", "other", "none"])
def test_a_state_that_cannot_be_read_or_is_another_jobs_is_not_gone_on_from(
    tmp_path: Path, tiny_base: Path, damage: str
) -> None:
    path = job_in(tmp_path / "run", tiny_base, max_steps=3)
    state = path.parent / "state.safetensors"
    signals = StopSignals()
    with pytest.raises(Stopped):
        run_here(path, Log(step1=lambda: signals(signal.SIGTERM, None)), signals)
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:-8])
    elif damage == "none":
        save_file(load_file(state), state)
    else:
        path.write_text(path.read_text().replace('"learning_rate": 0.03', '"learning_rate": 0.02'))
    assert run_here(path, Log()).steps() == [1, 2, 3]


def test_a_full_disk_is_said_once_and_the_training_goes_on(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "save_file", full)
    path = job_in(tmp_path / "run", tiny_base, every_s=0.0)
    log = run_here(path, Log())
    [warning] = log.of("warning")
    assert warning["message"] == "the run's state could not be saved: No space left on device"
    assert not log.of("saved") and log.steps()[-1] == STEPS and adapter(path)


def test_a_full_disk_is_known_by_its_error() -> None:
    """As Python says it, and the library that writes tensors."""
    assert is_disk_full(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert is_disk_full(SafetensorError("I/O error: No space left on device (os error 28)"))
    assert not is_disk_full(ValueError("something else"))


def test_adapters_on_the_way_are_kept_once_and_are_those_of_their_steps(
    tmp_path: Path, tiny_base: Path
) -> None:
    path = job_in(tmp_path / "run", tiny_base, checkpoints=3, eval_steps=5)
    kept = tmp_path / "kept"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kept_dir": str(kept)}))
    log = run_here(path, Log())
    assert sorted(int(folder.name) for folder in kept.iterdir()) == [5, 10, 15]
    told = {event["step"]: event for event in log.of("progress")}
    for step in (5, 10, 15):
        metrics = json.loads((kept / str(step) / "metrics.json").read_text())
        assert metrics == {
            "step": step,
            "train_loss": told[step]["loss"],
            "full_valid_loss": told[step]["validation_loss"],
        }
    # A training that is stopped after that step has this adapter in its state.
    part = job_in(tmp_path / "part", tiny_base, checkpoints=3, eval_steps=5)
    signals = StopSignals()
    with pytest.raises(Stopped):
        run_here(part, Log(step10=lambda: signals(signal.SIGTERM, None)), signals)
    saved = SavedTraining.read(part.parent / "state.safetensors")
    assert saved is not None and saved.step == 10
    tensors = load_file(kept / "10" / "adapter_model.safetensors")
    state = saved.part("adapter.")
    assert tensors.keys() == state.keys()
    assert all(bool((tensors[name] == state[name]).all()) for name in state)


def test_stopped_between_two_steps_of_several_batches_it_makes_the_same_steps(
    tmp_path: Path, tiny_base: Path
) -> None:
    """At the end of an epoch, whose last step has fewer batches, and within one."""
    several = {"gradient_accumulation": 2, "batch_size": 3, "max_steps": 12}
    whole = run_here(path := job_in(tmp_path / "whole", tiny_base, **several), Log())
    per_epoch = -(-whole.of("started")[0]["examples"] // 6)
    part = job_in(tmp_path / "part", tiny_base, **several)
    losses: list[float] = []
    for step in (per_epoch, per_epoch + 2):
        signals = StopSignals()
        log = Log(**{f"step{step}": lambda signals=signals: signals(signal.SIGTERM, None)})
        with pytest.raises(Stopped):
            run_here(part, log, signals)
        losses += log.losses()
    losses += run_here(part, Log()).losses()
    assert losses == whole.losses() and len(losses) == 12
    assert adapter(part) == adapter(path)


@pytest.mark.parametrize(
    ("steps", "number", "kept"), [(6, 2, {2, 4}), (2, 10, {1}), (1, 3, set()), (9, 0, set())]
)
def test_the_steps_that_are_kept(steps: int, number: int, kept: set[int]) -> None:
    assert kept_steps(steps, number) == kept
