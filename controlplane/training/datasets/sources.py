"""The sources that datasets are pulled from: set, shown and deleted by the tenant in scope."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping
from typing import Any

from celery import signature
from django.db import transaction
from django.utils import timezone
from kombu.exceptions import OperationalError

from controlplane.errors import Conflict, InvalidRequest, require
from controlplane.events.audit.services import record
from controlplane.infra.outbound import outbound
from controlplane.infra.outbound.outbound_policy import Refused
from controlplane.tenancy.model_scope import check_named, check_unbound
from controlplane.tenants.models import is_slug
from controlplane.training import cron
from controlplane.training.datasets import captured_rows, pull_sources, versions
from controlplane.training.models import DatasetPull, DatasetSource

log = logging.getLogger(__name__)

#: The name of the task that pulls; its module imports this one.
PULL_TASK = "controlplane.training.tasks.dataset_pulls_run"
#: Largest number of a tenant's sources.
MAX_SOURCES = 100
#: Time after which a waiting message is dropped; the next tick sends another.
_MESSAGE_S = 60


@transaction.atomic
def source_set(
    *,
    name: str,
    kind: str,
    place: Mapping[str, str],
    secrets: Mapping[str, str],
    cron_line: str | None = None,
    timezone_name: str | None = None,
) -> DatasetSource:
    """Make or replace the source of the dataset of this name, which need not exist yet.

    place    endpoint, region, bucket, prefix of s3; repository, revision, prefix of hub; only and
             model of captured requests
    secrets  access_key_id, secret_access_key, session_token; or token. Without any, those of before
             stay if the place is the same
    What is None stays as it is.
    Objects that were pulled from the same place are not pulled again. Raises InvalidRequest that
    names the field, Conflict for too many sources.
    """
    versions.name_check(name)
    versions.check_users(name)
    _check_place(kind, place)
    if kind == DatasetSource.Kind.CAPTURED:
        captured_rows.source_filter(place)
    else:
        pull_sources.PLACES[kind](place, secrets)
    if kind == DatasetSource.Kind.S3:
        try:
            outbound.check(f"{place['endpoint']}/")
        except Refused as error:
            raise InvalidRequest(str(error), param="endpoint") from error
    known = DatasetSource.objects.select_for_update().filter(name=name).first()
    if known is not None:
        _check_place(known.kind, known.place)
    if cron_line is None:
        cron_line = known.cron if known else ""
    if timezone_name is None:
        timezone_name = known.timezone if known else "UTC"
    next_pull_at = next_slot(cron_line, timezone_name)
    if known is None and DatasetSource.objects.count() >= MAX_SOURCES:
        raise Conflict(f"A tenant can have at most {MAX_SOURCES} sources.", code="too_many_sources")
    is_same = known is not None and (known.kind, known.place) == (kind, dict(place))
    before = _fields(known) if known else None
    source, is_new = DatasetSource.objects.update_or_create(
        name=name,
        defaults={
            "kind": kind,
            "place": dict(place),
            **({} if is_same and not secrets else {"sealed": pull_sources.seal(secrets)}),
            "cron": cron_line,
            "timezone": timezone_name,
            "next_pull_at": next_pull_at,
            # A running pull reads the old place and must change nothing any more.
            "fence": known.fence + 1 if known else 0,
            "lease_until": None,
            **({} if is_same else {"seen": []}),
        },
    )
    record("created" if is_new else "changed", source, before=before, after=_fields(source))
    return source


def _check_place(kind: str, place: Mapping[str, str]) -> None:
    """Raise PermissionDenied if the caller may not name the model whose requests are captured."""
    if kind == DatasetSource.Kind.CAPTURED and place.get("model"):
        check_named(place["model"], "model")
    elif kind == DatasetSource.Kind.CAPTURED:
        check_unbound(
            "Without a model the source has the requests to all models: name a model.",
            "model",
        )


def _fields(source: DatasetSource) -> dict[str, Any]:
    return {name: getattr(source, name) for name in ("name", "kind", "place", "cron", "timezone")}


def next_slot(cron_line: str, timezone_name: str) -> dt.datetime | None:
    """Return the time of the next pull by the cron line; None: there is none.

    Raises InvalidRequest that names the field.
    """
    try:
        cron.check_timezone(timezone_name)
    except ValueError as error:
        raise InvalidRequest(f"{timezone_name[:64]!r}: {error}.", param="timezone") from error
    if not cron_line:
        return None
    try:
        if len(cron_line) > 100:
            raise ValueError("it can have at most 100 characters")
        return cron.next_slot(cron_line, timezone_name, timezone.now())
    except ValueError as error:
        raise InvalidRequest(f"{cron_line[:100]!r}: {error}.", param="cron") from error


def source_get(*, name: str) -> DatasetSource:
    """Return the source of the dataset of this name. Raises NotFound."""
    found = DatasetSource.objects.filter(name=name).first() if is_slug(name) else None
    found = require(found, "The dataset has no source.")
    _check_place(found.kind, found.place)
    return found


@transaction.atomic
def source_delete(*, source: DatasetSource) -> None:
    """Delete a source with its history; a running pull changes nothing any more."""
    versions.check_users(source.name)
    _check_place(source.kind, source.place)
    record("deleted", source, before=_fields(source))
    source.delete()


@transaction.atomic
def pull_request(*, source: DatasetSource) -> None:
    """Request a pull now. A repeated call before it has begun changes nothing.

    A schedule does this before it trains, and waits while `is_pulling`.
    """
    versions.check_users(source.name)
    DatasetSource.objects.filter(pk=source.pk).update(next_pull_at=timezone.now())
    record("pull_requested", source)
    transaction.on_commit(pulls_send)


def is_pulling(*, source: DatasetSource) -> bool:
    """Return whether a pull is due or runs, so that a newer version may come soon."""
    source.refresh_from_db(fields=["next_pull_at", "lease_until"])
    now = timezone.now()
    is_due = source.next_pull_at is not None and source.next_pull_at <= now
    return is_due or (source.lease_until is not None and source.lease_until > now)


def last_pull(source: DatasetSource) -> DatasetPull | None:
    """Return the newest pull."""
    return source.pulls.order_by("-created_at").first()


def pulls_send() -> None:
    """Queue the pulls that are due. If that fails, a later tick does it."""
    try:
        signature(PULL_TASK).apply_async(expires=_MESSAGE_S)
    except OperationalError:
        log.warning("a pull waits for the next tick: the broker does not answer")
