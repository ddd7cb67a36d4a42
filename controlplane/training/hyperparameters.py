"""Check hyperparameters as the trainer does."""

from __future__ import annotations

from typing import Any

from contract.training.job import Hyperparameters, JobError
from controlplane.errors import InvalidRequest


def checked_hyperparameters(fields: Any) -> dict[str, Any]:
    """Return the hyperparameters; None means all defaults. Raises InvalidRequest."""
    given = {} if fields is None else fields
    try:
        Hyperparameters.from_dict(given)
    except JobError as error:
        raise InvalidRequest(f"It {error.problem}.", param=error.field) from error
    return dict(given)
