"""What a training may be asked for, and its way from one process to the other."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from contract.training.job import RANGES, Hyperparameters, JobError, TrainJob
from tests.range_ends import inside, outside


def test_each_number_has_its_range() -> None:
    fields = {field.name for field in dataclasses.fields(Hyperparameters)}
    assert fields == {
        *RANGES,
        "method",
        "grader",
        "target_modules",
        "truncate",
        "gradient_checkpointing",
        "skip_thoughts",
    }


REWARDED: dict[str, Any] = {
    "method": "reinforcement",
    "grader": {"type": "string_check", "input": "a", "reference": "b", "operation": "eq"},
}


@pytest.mark.parametrize("name", RANGES)
def test_numbers_within_their_ranges_are_taken_and_no_others(name: str) -> None:
    allowed, method = RANGES[name], {"method": "dpo"} if name == "beta" else {}
    if name in ("samples", "max_tokens", "clip"):
        method = REWARDED
    for value in inside(allowed):
        assert getattr(Hyperparameters.from_dict({name: value, **method}), name) == value
    wrong: list[Any] = [*outside(allowed), "1", True, float("nan"), []]
    wrong += [allowed.least + 0.5] if allowed.is_whole else []
    # as if it were left out
    may_be_none = name in ("max_steps", "eval_steps", "patience") or bool(method)
    wrong += [] if may_be_none else [None]
    for value in wrong:
        with pytest.raises(JobError, match=f"^hyperparameters.{name}: must be a ") as caught:
            Hyperparameters.from_dict({name: value, **method})
        assert caught.value.field == f"hyperparameters.{name}"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", "fast"),
        ("target_modules", "q_proj"),
        ("target_modules", []),
        ("dropout", 0.1),
        ("truncate", 1),
        ("packing", True),
        ("gradient_checkpointing", 1),
        ("quantization", "4bit"),
        ("method", "kto"),
        ("method", ["dpo"]),
        ("beta", 0.1),
        ("samples", 4),
        ("grader", REWARDED["grader"]),
    ],
)
def test_a_wrong_hyperparameter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(JobError, match=rf"hyperparameters\.{field}"):
        Hyperparameters.from_dict({field: value})


def test_a_method_has_its_own_defaults() -> None:
    dpo = Hyperparameters.from_dict({"method": "dpo"})
    assert (dpo.beta, dpo.learning_rate, dpo.rows_per_example) == (0.1, 1e-4, 2)
    assert Hyperparameters.from_dict({"method": "dpo", "learning_rate": 1}).learning_rate == 1
    with pytest.raises(JobError, match=r"^hyperparameters\.draft_heads: learn chats alone"):
        Hyperparameters.from_dict({"method": "dpo", "draft_heads": 1})
    rewarded = Hyperparameters.from_dict(REWARDED)
    assert (rewarded.samples, rewarded.max_tokens, rewarded.clip) == (8, 256, 0.2)
    assert rewarded.most_tokens(100) == 8 * 356
    for change, told in (
        ({"grader": None}, "hyperparameters.grader: must be given"),
        ({"grader": {"type": "x"}}, "hyperparameters.grader.type: must be one of"),
    ):
        with pytest.raises(JobError, match=told):
            Hyperparameters.from_dict(REWARDED | change)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_model_dir", None),
        ("dataset", ""),
        ("output_dir", 5),
        ("kept_dir", ""),
        ("salt", 5),
        ("num_threads", 0),
        ("most_steps", 1.5),
        ("gpu_share", 0.0),
        ("gpu_share", 1.1),
        ("hyperparameters", []),
    ],
)
def test_a_jobs_wrong_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    paths = {name: str(tmp_path) for name in ("base_model_dir", "dataset", "output_dir")}
    (tmp_path / "job.json").write_text(json.dumps({**paths, field: value}))
    with pytest.raises(JobError, match="must be ") as caught:
        TrainJob.read(tmp_path / "job.json")
    assert caught.value.field == field
