"""Make a data set of captured requests. The one place that knows how its rows are stored."""

from __future__ import annotations

import dataclasses

from controlplane.errors import InvalidRequest
from controlplane.requestlog.captured import Filter, rows_of
from controlplane.training import services
from controlplane.training.models import Dataset


@dataclasses.dataclass(frozen=True, slots=True)
class FromCaptured:
    """The data set, and how many captured requests gave no row of it."""

    dataset: Dataset
    num_left_out: int


def dataset_from_captured(*, name: str, wanted: Filter) -> FromCaptured:
    """Make the data set of this name from captured requests of the tenant in scope.

    Rows that it had are replaced for later runs. Raises InvalidRequest when there are none, and
    what `dataset_upload` raises.
    """
    rows = rows_of(wanted)
    if not rows.num_rows:
        raise InvalidRequest(
            "No captured request is as you ask for: see GET /api/v1/captured-requests.",
            param="only",
            code="nothing_captured",
        )
    dataset = services.dataset_upload(name=name, content=rows.content)
    return FromCaptured(dataset, rows.num_left_out)
