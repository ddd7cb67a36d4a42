"""The control plane refuses what the trainer would, and names the field."""

from __future__ import annotations

from typing import Any

import pytest

from contract.training.job import Hyperparameters
from controlplane.errors import InvalidRequest
from controlplane.training.runs.hyperparameters import checked_hyperparameters, most_tokens


@pytest.mark.parametrize(
    "targets", [None, [], "q_proj", ["a"] * 17, ["q_proj", 1], ["a.b"], [".*"], [""]]
)
def test_targets_are_plain_names(targets: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_hyperparameters({"target_modules": targets})
    assert (caught.value.param or "").startswith("hyperparameters.target_modules")


def test_a_wrong_one_is_named() -> None:
    for fields, param in [
        ([], "hyperparameters"),
        ({"rank": 8, "dropout": 0.1}, "hyperparameters.dropout"),
        ({"rank": 0}, "hyperparameters.rank"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            checked_hyperparameters(fields)
        assert caught.value.param == param
    with pytest.raises(InvalidRequest, match="is not a hyperparameter; there are: method, beta"):
        checked_hyperparameters({"quantization": "nf4"})
    good = {"rank": 8, "alpha": 16, "learning_rate": 1e-3, "target_modules": ["q_proj"]}
    assert checked_hyperparameters(good) == good
    assert checked_hyperparameters(None) == {}


def test_a_step_of_several_batches_has_all_their_rows() -> None:
    hyper = Hyperparameters(batch_size=2, gradient_accumulation=3, epochs=2, max_length=10)
    assert hyper.num_steps(13) == 2 * 3  # of seven batches, the last with one row
    assert most_tokens(hyper, 13) == 6 * 6 * 10
    assert most_tokens(hyper, 4) == 2 * 4 * 10
