"""Make datasets of captured requests; only this module knows how their rows are stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from django.db import transaction

from controlplane.errors import InvalidRequest
from controlplane.requestlog.captured import ONLY, Filter, dataset_note, rows_of
from controlplane.training.datasets import services as dataset_services
from controlplane.training.datasets import versions
from controlplane.training.models import Dataset


@dataclasses.dataclass(frozen=True, slots=True)
class FromCaptured:
    """The dataset, the number of new rows, and of captured requests that gave none."""

    dataset: Dataset
    num_added: int
    num_left_out: int


def source_filter(place: Mapping[str, str]) -> Filter:
    """Return the filter for the captured requests of a source. Raises InvalidRequest."""
    only = place.get("only", "good")
    if only not in ONLY:
        raise InvalidRequest(f"This must be one of {', '.join(ONLY)}.", param="only")
    return Filter(only=only, model=place.get("model") or None)


def dataset_from_captured(
    *,
    name: str,
    wanted: Filter,
    appends: bool = False,
    kind: versions.Kind | None = None,
) -> FromCaptured:
    """Make the dataset of this name from captured requests of the tenant in scope.

    appends  add those whose rows it does not have behind its own; none: it stays as it is.
             Else rows that it had are replaced for later runs
    kind     of the version; None: as `appends` says
    Raises InvalidRequest when there are none to begin with, Conflict when another call adds the
    same, and what `dataset_upload` raises.
    """
    versions.name_check(name)
    known = Dataset.objects.filter(name=name).first() if appends else None
    if known is not None:
        wanted = dataclasses.replace(wanted, unless_in=known.pk)
    rows = rows_of(wanted)
    if not rows.num_rows:
        if known is not None:
            return FromCaptured(known, 0, rows.num_left_out)
        raise InvalidRequest(
            "No captured request fits the filters: see GET /api/v1/captured-requests.",
            param="only",
            code="nothing_captured",
        )
    stored = dataset_services.rows_store(rows.content, has_requests=True)
    kind = kind or (versions.Kind.APPEND if appends else versions.Kind.UPLOAD)
    with transaction.atomic():
        dataset = versions.version_add(name=name, rows=stored, kind=kind, appends=appends)
        dataset_note(dataset_id=dataset.pk, keys=rows.keys, appends=appends)
    return FromCaptured(dataset, rows.num_rows, rows.num_left_out)
