"""Differences between two versions of an adapter: config, files, provenance, training."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Mapping
from typing import Any

from contract.adapters.peft_config import UPLOAD_LIMITS, load_json
from contract.adapters.problems import AdapterProblems
from controlplane.adapters.models import AdapterVersion
from controlplane.infra import storage
from controlplane.training.models import TrainingRun

Status = AdapterVersion.Status

#: The comparable fields of a run's last progress.
_METRICS = (
    "steps",
    "loss",
    "reward",
    "reward_margin",
    "learning_rate",
    "tokens_per_s",
    "eval_loss",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference: `before` and `after` are JSON values; None where there is none."""

    area: str
    field: str
    before: Any
    after: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The origin of a version. `run` is None for an uploaded one."""

    version: AdapterVersion
    run: TrainingRun | None
    #: adapter_config.json; None when the version has no files.
    config: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    before: Side
    after: Side
    changes: tuple[Change, ...]


def versions_compare(before: AdapterVersion, after: AdapterVersion) -> Comparison:
    """Return the differences. Raises Unavailable when the store does not answer."""
    sides = _side(before), _side(after)
    changes = [
        Change(area=area, field=field, before=one.get(field), after=other.get(field))
        for (area, one), (_, other) in zip(_areas(sides[0]), _areas(sides[1]), strict=True)
        for field in sorted(one.keys() | other.keys())
        if one.get(field) != other.get(field)
    ]
    return Comparison(before=sides[0], after=sides[1], changes=tuple(changes))


def _side(version: AdapterVersion) -> Side:
    runs = TrainingRun.objects.filter(version=version).select_related("dataset", "created_by")
    return Side(version=version, run=runs.first(), config=_config(version))


@storage.answering()
def _config(version: AdapterVersion) -> Mapping[str, Any] | None:
    has_files = version.status in (Status.READY, Status.RETIRED) and version.removed_at is None
    if not has_files or not version.digest:
        return None
    try:
        text = storage.read_bytes(version.config_key, max_bytes=UPLOAD_LIMITS.max_bytes)
        return load_json(text, UPLOAD_LIMITS.max_bytes)
    except storage.ObjectMissing:
        return None
    except AdapterProblems:  # somebody else wrote to the store
        return None


def _areas(side: Side) -> Iterator[tuple[str, Mapping[str, Any]]]:
    version, run = side.version, side.run
    yield "config", side.config or {}
    yield (
        "files",
        {
            **{name: value for name, value in version.report.items() if value not in ("", None)},
            "digest": version.digest or None,
            "num_bytes": version.num_bytes,
        },
    )
    yield (
        "provenance",
        {
            "source": version.source,
            **version.origin,
            "created_by": version.created_by.email if version.created_by else None,
            "created_at": _time(version.created_at),
            "status": version.status,
            "run": str(run.pk) if run else None,
            "dataset": run.dataset.name if run and run.dataset else None,
            "dataset_sha256": run.dataset_sha256 if run else None,
        },
    )
    yield "hyperparameters", run.hyperparameters if run else {}
    progress = run.progress if run else {}
    yield "metrics", {name: progress[name] for name in _METRICS if name in progress}


def _time(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
