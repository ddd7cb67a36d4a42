"""The cost of a training, before it is started."""

from __future__ import annotations

import dataclasses
from typing import Any

from contract.training.job import Hyperparameters
from controlplane.training.datasets import reports
from controlplane.training.models import Dataset
from controlplane.training.runs.hyperparameters import check_rows, check_size, most_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A training's length.

    rows         that it trains on
    is_rounded   whether the rows kept back are estimated by their share
    most_tokens  that it reads, if every row has the longest length
    tokens       that it reads; None: the dataset has no report for the base model yet
    seconds      at the speed of recent runs; None: without tokens, or without such runs
    """

    rows: int
    is_rounded: bool
    steps: int
    most_tokens: int
    tokens: int | None
    seconds: float | None


def run_cost(dataset: Dataset, hyperparameters: dict[str, Any], base_model: str) -> Cost:
    """Return the cost of a run over a dataset. Raises InvalidRequest when it would be too long.

    hyperparameters  checked ones; they are admitted as if no row were kept back to validate with
    """
    check_rows(dataset.num_rows)
    check_size(hyperparameters, dataset.num_rows)
    hyper = Hyperparameters.from_dict(hyperparameters)
    rows = dataset.num_rows - round(dataset.num_rows * hyper.validation_share)
    steps, most = hyper.num_steps(rows), most_tokens(hyper, rows)
    counts = reports.report_of(dataset)["bases"].get(base_model)
    tokens = seconds = None
    if counts is not None:
        of_rows = counts["tokens"] * rows / dataset.num_rows
        tokens = min(most, round(of_rows * steps / hyper.steps_per_epoch(rows)))
        if counts["tokens_per_s"]:
            seconds = tokens / counts["tokens_per_s"]
    return Cost(
        rows=rows,
        is_rounded=bool(hyper.validation_share),
        steps=steps,
        most_tokens=most,
        tokens=tokens,
        seconds=seconds,
    )
