"""What a training may be asked for, and its way from one process to the other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from contract.training.job import BOUNDS, Hyperparameters, JobError, TrainJob


def test_each_number_has_its_bounds() -> None:
    fields = {field.name for field in dataclasses.fields(Hyperparameters)}
    others = {"truncate", "packing", "gradient_checkpointing"}
    assert fields == {*BOUNDS, "target_modules", *others}


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_within_their_bounds_are_taken_and_no_others(name: str) -> None:
    is_whole, least, most = BOUNDS[name]
    for value in (least, most):
        assert getattr(Hyperparameters.from_dict({name: value}), name) == value
    step = 1 if is_whole else (least or 1) / 1000
    wrong: list[Any] = [least - step, most + 1, "1", True, float("nan"), []]
    wrong += [least + 0.5] if is_whole else []
    may_be_none = name in ("max_steps", "eval_steps", "patience")  # as if it were left out
    wrong += [] if may_be_none else [None]
    for value in wrong:
        with pytest.raises(JobError, match=f"^hyperparameters.{name}: must be a ") as caught:
            Hyperparameters.from_dict({name: value})
        assert caught.value.field == f"hyperparameters.{name}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", "fast"),
        ("target_modules", "q_proj"),
        ("target_modules", []),
        ("dropout", 0.1),
        ("truncate", 1),
        ("packing", "yes"),
        ("gradient_checkpointing", 1),
        ("quantization", "4bit"),
    ],
)
def test_a_wrong_hyperparameter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(JobError, match=rf"hyperparameters\.{field}"):
        Hyperparameters.from_dict({field: value})


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    job = TrainJob(
        base_model_dir=tmp_path,
        dataset=tmp_path / "config.json",
        output_dir=tmp_path / "out",
        hyperparameters=Hyperparameters(rank=3, target_modules=("a", "b"), max_steps=None),
        num_threads=2,
        gpu_share=0.25,
        most_steps=7,
        most_tokens=8,
        validation_dataset=tmp_path / "config.json",
        salt="x",
        warm_start=tmp_path / "config.json",
    )
    job.write(tmp_path / "job.json")
    assert TrainJob.read(tmp_path / "job.json") == job
    for name in ("dataset", "validation_dataset", "warm_start"):
        dataclasses.replace(job, **{name: tmp_path / "gone"}).write(tmp_path / "job.json")
        with pytest.raises(JobError, match="there is no such file") as caught:
            TrainJob.read(tmp_path / "job.json")
        assert caught.value.field == name
