"""The control plane and the trainer refuse the same hyperparameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from controlplane.errors import InvalidRequest
from controlplane.training.hyperparameters import BOUNDS, check
from worker.training.job import Hyperparameters, JobError


def test_both_know_the_same_names() -> None:
    fields = {field.name for field in dataclasses.fields(Hyperparameters)}
    assert fields == {*BOUNDS, "target_modules"}


@pytest.mark.parametrize("name", BOUNDS)
def test_both_have_the_same_bounds(name: str) -> None:
    is_whole, least, most = BOUNDS[name]
    step = 1 if is_whole else least / 1000
    candidates: list[Any] = [least, most, least - step, most + 1, None, "1", True, float("nan"), []]
    if is_whole:
        candidates.append(least + 0.5)
    for value in candidates:
        if name == "max_steps" and value is None:
            continue  # the trainer's default, which a client says by leaving it out
        assert is_taken_by_control_plane({name: value}) == is_taken_by_trainer({name: value}), value
    assert is_taken_by_control_plane({name: least})
    assert not is_taken_by_control_plane({name: most + 1})


@pytest.mark.parametrize(
    "targets", [[], "q_proj", ["a"] * 17, ["q_proj", 1], ["a.b"], [".*"], [""]]
)
def test_targets_are_plain_names(targets: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check({"target_modules": targets})
    assert (caught.value.param or "").startswith("hyperparameters.target_modules")


def test_a_wrong_one_is_named() -> None:
    for fields, param in [
        ([], "hyperparameters"),
        ({"rank": 8, "dropout": 0.1}, "hyperparameters.dropout"),
        ({"rank": 0}, "hyperparameters.rank"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            check(fields)
        assert caught.value.param == param
    good = {"rank": 8, "alpha": 16, "learning_rate": 1e-3, "target_modules": ["q_proj"]}
    assert check(good) == good


def is_taken_by_control_plane(fields: dict[str, Any]) -> bool:
    try:
        check(fields)
    except InvalidRequest:
        return False
    return True


def is_taken_by_trainer(fields: dict[str, Any]) -> bool:
    try:
        Hyperparameters.from_dict(fields)
    except JobError:
        return False
    return True
