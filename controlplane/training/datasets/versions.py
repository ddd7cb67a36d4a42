"""Versions of a dataset: each has rows that never change; appending makes the next one.

A version with appended rows shares the bytes of those before it: only the added rows are stored.
Versions whose rows are part of the current one are kept, and after a pull or a restore also the one
before, so that each can be undone; others are given up, and `contents` removes their rows.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q

from contract.training.chat_rows import MAX_ROWS
from controlplane.errors import Conflict, InvalidRequest, NotFound, PayloadTooLarge
from controlplane.events.audit.services import record
from controlplane.tenancy.model_scope import check_unbound, may_name
from controlplane.tenants.models import is_slug, slug_validator
from controlplane.training.datasets import contents, reports
from controlplane.training.datasets.contents import Rows
from controlplane.training.models import (
    Dataset,
    DatasetContent,
    DatasetVersion,
    Schedule,
    TrainingRun,
)

Kind = DatasetVersion.Kind

#: Largest number of a dataset's versions; then appending needs an upload of all rows.
MAX_VERSIONS = 2000


def name_check(name: str) -> None:
    """Raise InvalidRequest for an invalid name of a dataset."""
    if not is_slug(name):
        raise InvalidRequest(str(slug_validator.message), param="name")


def check_users(name: str) -> None:
    """Raise PermissionDenied if a dataset trains a model that the caller may not name."""
    of_it = Q(dataset__name=name) | Q(validation_dataset__name=name)
    schedules = Schedule.objects.filter(of_it).values_list("adapter__name", flat=True)
    runs = TrainingRun.objects.filter(of_it, status__in=TrainingRun.ACTIVE)
    users = [*schedules, *runs.values_list("adapter__name", flat=True)]
    if not all(map(may_name, users)):
        check_unbound("Another model, which you may not name, is trained on this dataset.", "name")


@transaction.atomic
def version_add(*, name: str, rows: Rows, kind: Kind, appends: bool) -> Dataset:
    """Make these rows a dataset's next version, alone or appended; make the dataset first.

    Rows that it has already, as a whole or, for appending, as a part, change nothing: a request may
    be repeated. Raises InvalidRequest, PayloadTooLarge when it would be too large.
    """
    name_check(name)
    check_users(name)
    dataset = Dataset.objects.select_for_update().filter(name=name).first()
    fields = {"sha256": rows.sha256, "num_bytes": rows.num_bytes, "num_rows": rows.num_rows}
    if dataset is None:
        dataset = Dataset.objects.create(name=name, **fields)
        _version(dataset, 1, kind, rows.num_rows)
        record("created", dataset, after={"name": name, **fields})
        transaction.on_commit(lambda: reports.report_send(dataset))
        return dataset
    _note_current(dataset)
    if appends:
        if rows.sha256 in contents.parts_of(dataset.sha256):
            return dataset
        fields = _appended(dataset, rows)
    elif dataset.sha256 == rows.sha256:
        dataset.save(update_fields=["updated_at"])
        record("changed", dataset, before=_fields(dataset), after={"name": name, **fields})
        return dataset
    _change(dataset, kind, fields, added_rows=rows.num_rows)
    return dataset


@transaction.atomic
def version_restore(*, dataset: Dataset, number: int) -> Dataset:
    """Make an earlier version's rows the current ones again, as the next version.

    Raises NotFound, Conflict when its rows were replaced and given up.
    """
    check_users(dataset.name)
    dataset = Dataset.objects.select_for_update().get(pk=dataset.pk)
    _note_current(dataset)
    version = version_get(dataset, number)
    if version.sha256 == dataset.sha256:
        return dataset
    fields = {name: getattr(version, name) for name in ("sha256", "num_bytes", "num_rows")}
    _change(dataset, Kind.RESTORE, fields, added_rows=0)
    return dataset


def version_get(dataset: Dataset, number: int, *, param: str | None = None) -> DatasetVersion:
    """Return a version whose rows are stored. Raises NotFound, Conflict."""
    version = dataset.versions.filter(number=number).first()
    if version is None:
        raise NotFound(f"The dataset has no version {number}.", param=param)
    if not version.is_stored:
        raise Conflict(
            f"The rows of version {number} were replaced and are no longer kept.",
            param=param,
            code="rows_gone",
        )
    return version


def _appended(dataset: Dataset, rows: Rows) -> dict[str, Any]:
    """Return the fields of the dataset with more rows behind its own."""
    # A missing line end between the two is counted.
    total, num_rows = dataset.num_bytes + 1 + rows.num_bytes, dataset.num_rows + rows.num_rows
    if total > settings.MAX_DATASET_BYTES:
        raise PayloadTooLarge(
            f"The dataset would have {total} bytes; {settings.MAX_DATASET_BYTES} are the limit.",
            param="body",
        )
    if num_rows > MAX_ROWS:
        raise InvalidRequest(
            f"The dataset would have {num_rows} rows; {MAX_ROWS} are the limit.",
            param="body",
            code="invalid_dataset",
        )
    if dataset.versions.count() >= MAX_VERSIONS:
        raise Conflict(
            f"A dataset can have at most {MAX_VERSIONS} versions: upload under another name.",
            code="too_many_versions",
        )
    joined = contents.content_join(dataset.sha256, rows.sha256)
    return {"sha256": joined, "num_bytes": total, "num_rows": num_rows}


def _change(dataset: Dataset, kind: Kind, fields: dict[str, Any], *, added_rows: int) -> None:
    before, left = _fields(dataset), dataset.sha256
    for name, value in fields.items():
        setattr(dataset, name, value)
    last = dataset.versions.order_by("-number").values_list("number", flat=True).first()
    dataset.version = (last or 0) + 1
    dataset.report_status, dataset.report = reports.Pending, {}
    dataset.save()
    _version(dataset, dataset.version, kind, added_rows)
    kept = _whole_and_beginnings(dataset.sha256)
    if kind in (Kind.PULL, Kind.RESTORE):
        kept |= {left}
    dataset.versions.filter(is_stored=True).exclude(sha256__in=kept).update(is_stored=False)
    record("changed", dataset, before=before, after={"name": dataset.name, **_fields(dataset)})
    transaction.on_commit(lambda: reports.report_send(dataset))


def _whole_and_beginnings(sha256: str) -> set[str]:
    """Return the digests of rows, and of the earlier rows in them."""
    made = DatasetContent.objects.exclude(added="").values_list("sha256", "previous")
    joined, found = dict(made), {sha256}
    while sha256 in joined:
        sha256 = joined[sha256]
        found.add(sha256)
    return found


def _note_current(dataset: Dataset) -> None:
    """Make the current rows a version, if a release without versions stored them."""
    current = dataset.versions.filter(number=dataset.version).first()
    if current is None or current.sha256 != dataset.sha256:
        last = dataset.versions.order_by("-number").values_list("number", flat=True).first()
        dataset.version = (last or 0) + 1
        _version(dataset, dataset.version, Kind.UPLOAD, dataset.num_rows)
        dataset.save(update_fields=["version"])


def _version(dataset: Dataset, number: int, kind: Kind, added_rows: int) -> None:
    DatasetVersion.objects.create(
        dataset=dataset,
        number=number,
        kind=kind,
        sha256=dataset.sha256,
        num_bytes=dataset.num_bytes,
        num_rows=dataset.num_rows,
        added_rows=added_rows,
    )


def _fields(dataset: Dataset) -> dict[str, Any]:
    return {name: getattr(dataset, name) for name in ("version", "sha256", "num_bytes", "num_rows")}
