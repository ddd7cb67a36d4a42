"""A training that is validated: what is kept back, when it ends, and which state is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contract.training.chat_rows import numbered_rows
from contract.training.data_split import is_validation
from contract.training.job import Hyperparameters, JobError, TrainJob
from contract.training.row_messages import Row
from engine.text.codec import TextCodec
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.worker.training.job_runs import run, write_job, write_rows
from tests.worker.training.test_train import hf_losses
from worker.training.chat_data import DatasetError, load_data


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def row(prompt: str, answer: str = "world") -> dict[str, Any]:
    user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
    return {"messages": [user, assistant]}


#: What is learned of the first is wrong for the others, so that more steps make it worse.
TRAIN = [row(f"hello {number}", "how are you?") for number in range(8)]
OTHERS = [row(f"hello, world {number}", "system 12") for number in range(3)]


def job_of(
    folder: Path, base: Path, train: list[Any], others: list[Any] | None, **hyper: Any
) -> Path:
    job = write_job(folder, base, write_rows(folder / "train.jsonl", train), **hyper)
    fields = json.loads(job.read_text()) | {"salt": "salt"}
    if others is not None:
        fields["validation_dataset"] = str(write_rows(folder / "others.jsonl", others))
    job.write_text(json.dumps(fields))
    return job


def test_the_best_state_is_kept_and_training_ends_when_it_gets_no_better(
    tmp_path: Path, tiny_base: Path
) -> None:
    hyper = {"max_steps": 60, "eval_steps": 3, "patience": 2, "learning_rate": 0.05}
    code, events, stderr = run(job_of(tmp_path, tiny_base, TRAIN, OTHERS, **hyper))
    assert code == 0, stderr
    started, *progress, done = events
    assert (started["rows"], started["validation_rows"], started["leaked_rows"]) == (8, 3, 0)
    losses = {e["step"]: e["validation_loss"] for e in progress if "validation_loss" in e}
    assert list(losses) == list(range(3, 3 * len(losses) + 1, 3))
    best = min(losses, key=lambda step: losses[step])
    assert (done["best_step"], done["best_loss"]) == (best, losses[best])
    assert progress[-1]["best_step"] == best
    # Two validations without a better loss, and not all steps.
    assert progress[-1]["step"] == best + 6 < 60
    validated, _ = hf_losses(tiny_base, Path(done["output"]), tmp_path / "others.jsonl")
    # HF's is the mean over rows, which have the same number of tokens here.
    assert validated == pytest.approx(losses[best], rel=0.02)


def test_a_share_of_the_prompts_is_kept_back_by_the_rule(tmp_path: Path, tiny_base: Path) -> None:
    rows = [row(f"hello {number}") for number in range(20)]
    rows += rows[:5]
    path = job_of(tmp_path, tiny_base, rows, None, validation_share=0.3, max_steps=1)
    job = TrainJob.read(path)
    data = load_data(TextCodec(tiny_base), job)
    read = [each for _, each in numbered_rows(job.dataset.read_bytes().split(b"\n"))]
    expected = [is_validation(each, 0.3, "salt") for each in read if isinstance(each, Row)]
    assert 0 < sum(expected) < 25
    assert (data.num_rows, data.num_validation) == (25 - sum(expected), sum(expected))
    assert data.num_leaked == 0


def test_prompts_that_are_in_both_are_counted(tmp_path: Path, tiny_base: Path) -> None:
    others = [row("HELLO  3", "other"), row("fresh"), row("hello 3")]
    job = TrainJob.read(job_of(tmp_path, tiny_base, TRAIN, others, max_steps=1))
    data = load_data(TextCodec(tiny_base), job)
    assert (data.num_validation, data.num_leaked) == (3, 2)


@pytest.mark.parametrize(
    ("train", "others", "hyper", "message"),
    [
        (TRAIN[:1], None, {}, "rows to train on: 1; 2 are needed"),
        (TRAIN[:1] * 2, None, {"validation_share": 0.001}, "in the validation share of 0.001: rai"),
        (TRAIN[1:2] * 2, None, {"validation_share": 0.5}, "validation share of 0.5: add rows"),
        (TRAIN, [], {}, "has no rows"),
        (TRAIN, [row("a" * 200)], {"max_length": 64}, "of the validation dataset, line 1 has"),
        (TRAIN, None, {"patience": 2}, "hyperparameters.patience: needs rows to validate with"),
    ],
)
def test_too_little_is_a_clear_error(
    tmp_path: Path, tiny_base: Path, train: Any, others: Any, hyper: Any, message: str
) -> None:
    job = TrainJob.read(job_of(tmp_path, tiny_base, train, others, **hyper))
    with pytest.raises((DatasetError, JobError), match=message):
        load_data(TextCodec(tiny_base), job)


def test_hyperparameters_of_validation_have_bounds() -> None:
    for name, value in (("validation_share", 0.6), ("eval_steps", 0), ("patience", 0)):
        with pytest.raises(JobError, match=name):
            Hyperparameters.from_dict({name: value})
