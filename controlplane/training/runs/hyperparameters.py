"""Check hyperparameters as the trainer does, and how many steps and tokens they lead to."""

from __future__ import annotations

from typing import Any

from contract.grading.graders import num_models
from contract.training.job import Hyperparameters, JobError
from controlplane.errors import InvalidRequest
from controlplane.training.runs.rewards.grading import graders
from controlplane.usage.limits import quotas

#: Least number of rows, as in the trainer.
MIN_ROWS = 2


def checked_hyperparameters(fields: Any) -> dict[str, Any]:
    """Return the hyperparameters; None means all defaults. Raises InvalidRequest."""
    given = {} if fields is None else fields
    try:
        hyper = Hyperparameters.from_dict(given)
    except JobError as error:
        raise InvalidRequest(f"It {error.problem}.", param=error.field) from error
    if hyper.grader is not None:
        for grader in graders():
            grader.check(hyper.grader)
    return dict(given)


def most_tokens(hyper: Hyperparameters, num_rows: int) -> int:
    """Return the most tokens that a training reads, if every row has the maximum length."""
    rows = min(hyper.rows_per_step, num_rows)
    return hyper.num_steps(num_rows) * rows * hyper.most_tokens(hyper.max_length)


def check_size(hyperparameters: dict[str, Any], num_rows: int) -> None:
    """Check that the tenant in scope may have a run of this length. Raises InvalidRequest."""
    hyper = Hyperparameters.from_dict(hyperparameters)
    steps, most = hyper.num_steps(num_rows), quotas.allowed("training_steps")
    if steps > most:
        field = "max_steps" if hyper.max_steps else "epochs"
        raise InvalidRequest(
            f"The run would have {steps} steps; your organization's limit is {most}.",
            param=f"hyperparameters.{field}",
            code="training_too_long",
        )
    tokens, most = most_tokens(hyper, num_rows), quotas.allowed("training_tokens")
    if tokens > most:
        raise InvalidRequest(
            f"The run would read up to {tokens} tokens (steps x batch_size x "
            f"gradient_accumulation x max_length); your organization's limit is {most}.",
            param="hyperparameters",
            code="training_too_long",
        )
    if hyper.samples is not None and hyper.grader is not None:
        _check_samples(hyper, steps * min(hyper.rows_per_step, num_rows) * hyper.samples)


def _check_samples(hyper: Hyperparameters, samples: int) -> None:
    calls = samples * num_models(hyper.grader or {})
    for name, number, what in (
        ("training_samples", samples, "sample {} answers (steps x batch_size x samples)"),
        ("grader_calls", calls, "ask models for {} scores (answers x score_models and judges)"),
    ):
        if number > (most := quotas.allowed(name)):
            raise InvalidRequest(
                f"The run would {what.format(number)}; your organization's limit is {most}.",
                param="hyperparameters.samples",
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
