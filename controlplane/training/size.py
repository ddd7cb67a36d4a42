"""Compute a training's steps and the most tokens that they read, and check both."""

from __future__ import annotations

import math
from typing import Any

from contract.training.job import Hyperparameters
from controlplane.errors import InvalidRequest
from controlplane.usage.limits import quotas

_DEFAULTS = Hyperparameters()
#: Least number of rows, as in the trainer.
MIN_ROWS = 2


def num_steps(hyperparameters: dict[str, Any], num_rows: int) -> int:
    """Return the number of steps, as the trainer counts them."""
    if hyperparameters.get("max_steps"):
        return int(hyperparameters["max_steps"])
    num_batches = math.ceil(num_rows / _of(hyperparameters, "batch_size"))
    a_pass = math.ceil(num_batches / _of(hyperparameters, "gradient_accumulation"))
    return int(max(1, round(a_pass * _of(hyperparameters, "epochs"))))


def most_tokens(hyperparameters: dict[str, Any], num_rows: int) -> int:
    """Return the most tokens that a training reads, if every row has the maximum length."""
    rows = _of(hyperparameters, "batch_size") * _of(hyperparameters, "gradient_accumulation")
    a_step = min(rows, num_rows) * _of(hyperparameters, "max_length")
    return int(num_steps(hyperparameters, num_rows) * a_step)


def check(hyperparameters: dict[str, Any], num_rows: int) -> None:
    """Check that the tenant in scope may have a run of this length. Raises InvalidRequest."""
    steps, most = num_steps(hyperparameters, num_rows), quotas.allowed("training_steps")
    if steps > most:
        field = "max_steps" if hyperparameters.get("max_steps") else "epochs"
        raise InvalidRequest(
            f"The run would have {steps} steps; your organization's limit is {most}.",
            param=f"hyperparameters.{field}",
            code="training_too_long",
        )
    tokens, most = most_tokens(hyperparameters, num_rows), quotas.allowed("training_tokens")
    if tokens > most:
        raise InvalidRequest(
            f"The run would read up to {tokens} tokens (steps x batch_size x "
            f"gradient_accumulation x max_length); your organization's limit is {most}.",
            param="hyperparameters",
            code="training_too_long",
        )


def check_rows(num_rows: int) -> None:
    """Raise InvalidRequest for a dataset with too few rows to train on."""
    if num_rows < MIN_ROWS:
        raise InvalidRequest(
            f"The dataset has {num_rows} row; a training needs at least {MIN_ROWS}.",
            param="dataset",
            code="too_few_rows",
        )


def _of(hyperparameters: dict[str, Any], name: str) -> Any:
    return hyperparameters.get(name, getattr(_DEFAULTS, name))
