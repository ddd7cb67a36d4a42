"""Hold a checked version until a worker has computed with it what PEFT computes.

LORIKEET_PROBE says what becomes of a version when nobody can probe it: with `require` it waits,
with `try` it continues after LORIKEET_PROBE_WAIT_S, or at once if no inspector lives, and is probed
later; with `off` nothing is probed. `controlplane.evaluations.inspections` does the work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
from typing import Any

from celery import current_app
from celery.signals import celeryd_after_setup, heartbeat_sent, worker_shutdown
from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from controlplane.adapters.models import AdapterInspection, AdapterVersion
from controlplane.errors import Conflict, Unavailable
from controlplane.events.audit.services import record
from controlplane.infra.health import liveness

log = logging.getLogger(__name__)

Status = AdapterInspection.Status

QUEUE = "inspect"
INSPECT_TASK = "controlplane.evaluations.inspections.tasks.adapter_inspect"
NO_INSPECTOR = "No inspector runs: it is probed when one does."
TOO_LATE = "The probe did not end in time: it is repeated."
#: Time after which a silent inspector is not waited for; they report every 10 s.
_SILENT_S = 45.0
_ALIVE = "inspector"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The findings of the check of the files, which a ready version has."""

    digest: str
    max_rank: int
    report: dict[str, Any]


def hold(version: AdapterVersion, facts: Facts) -> bool:
    """Have a checked version probed. -> whether it waits for the probe.

    version  still `validating`, of the tenant in scope
    """
    if settings.PROBE == "off":
        return False
    is_held = settings.PROBE == "require" or is_inspector_alive()
    with transaction.atomic():
        rows = AdapterVersion.objects.select_for_update().filter(pk=version.pk)
        is_current = {"status": AdapterVersion.Status.VALIDATING, "kept_digest": facts.digest}
        if not rows.filter(**is_current).exists():
            return False  # another process has decided, or has checked other files
        AdapterInspection.objects.update_or_create(
            version=version,
            defaults={
                "status": Status.WAITING if is_held else Status.NOT_RUN,
                "why": "" if is_held else NO_INSPECTOR,
                "is_held": is_held,
                "held_until": _held_until() if is_held else None,
                "facts": dataclasses.asdict(facts) if is_held else {},
                "lease_until": None,
            },
        )
        # An inspector's result about the files of an earlier check no longer counts.
        AdapterInspection.objects.filter(version=version).update(attempts=F("attempts") + 1)
        if is_held:
            transaction.on_commit(lambda: inspection_send(version))
    return is_held


def _held_until() -> dt.datetime | None:
    if settings.PROBE == "require":
        return None
    return timezone.now() + dt.timedelta(seconds=settings.PROBE_WAIT_S)


def held(version: AdapterVersion) -> AdapterInspection | None:
    """Return the inspection that a version waits for; None if it waits for none."""
    return AdapterInspection.objects.filter(version=version, is_held=True).first()


def facts_if_over(inspection: AdapterInspection) -> Facts | None:
    """Return the facts of a held version that has waited long enough; None: it still waits.

    One without an end of its wait continues if LORIKEET_PROBE no longer requires a probe.
    """
    until = inspection.held_until
    waits = settings.PROBE == "require" if until is None else until > timezone.now()
    return None if waits else Facts(**inspection.facts)


def note_released(version: AdapterVersion) -> None:
    """Note that a version has become ready, or was rejected: nothing waits for its probe.

    Call it in the transaction that decides.
    """
    rows = AdapterInspection.objects.filter(version=version, is_held=True)
    rows.filter(status=Status.WAITING).update(status=Status.NOT_RUN, why=TOO_LATE)
    rows.update(is_held=False, held_until=None, facts={})


@transaction.atomic
def inspection_request(version: AdapterVersion) -> AdapterInspection:
    """Have a ready version inspected again, or for the first time; nothing changes if it waits.

    Raises Conflict for a version that is not ready, Unavailable if no inspector runs.
    """
    # Before its inspection, as a deletion does.
    version = AdapterVersion.objects.select_for_update().get(pk=version.pk)
    if version.status != AdapterVersion.Status.READY:
        raise Conflict(
            f"Version {version.number} is {version.status}: only a ready version can be inspected.",
            code="version_not_ready",
        )
    if settings.PROBE == "off" or not is_inspector_alive():
        raise Unavailable("No inspector is running: try again later.", code="no_inspector")
    inspection, is_new = AdapterInspection.objects.get_or_create(version=version)
    rows = AdapterInspection.objects.filter(pk=inspection.pk)
    rows = rows.exclude(status=Status.WAITING)
    if is_new or rows.update(status=Status.WAITING, why="", lease_until=None):
        record("inspection_requested", version)
        transaction.on_commit(lambda: inspection_send(version))
    inspection.refresh_from_db()
    return inspection


def inspection_send(version: AdapterVersion) -> None:
    """Tell an inspector that there is work; if the broker is away, the sweep does."""
    ids = (str(version.tenant_id), str(version.pk))
    try:
        current_app.send_task(INSPECT_TASK, ids, queue=QUEUE)
    except OperationalError as error:
        log.warning("an inspection waits for the sweep: %r", error)


def is_inspector_alive() -> bool:
    """Return whether an inspector showed itself lately; False without Redis."""
    with contextlib.suppress(RedisError, OSError):
        silent_s = liveness.silent_s(_ALIVE)
        return silent_s is not None and silent_s < _SILENT_S
    return False


def watch_inspectors() -> None:
    """Show Celery workers that consume the queue `inspect` to other machines."""
    celeryd_after_setup.connect(_note_queues)


def _note_queues(instance: Any, **_: Any) -> None:
    if QUEUE in instance.app.amqp.queues.consume_from:
        liveness.show_alive(_ALIVE)
        heartbeat_sent.connect(_show)
        worker_shutdown.connect(_hide)


def _show(**_: Any) -> None:
    liveness.show_alive(_ALIVE)


def _hide(**_: Any) -> None:
    liveness.hide(_ALIVE)


@transaction.atomic
def version_original_set(*, version: AdapterVersion, keeps_original: bool) -> AdapterVersion:
    """Say whether a version answers with its original even where its FP8 copy would do.

    Gateways see it within half a second; running requests finish as they began.
    """
    rows = AdapterVersion.objects.filter(pk=version.pk).exclude(keeps_original=keeps_original)
    if rows.update(keeps_original=keeps_original):
        named = {"adapter": version.adapter.name, "number": version.number}
        before = {"keeps_original": not keeps_original}
        after = named | {"keeps_original": keeps_original}
        record("precision_set", version, before=before, after=after)
    version.keeps_original = keeps_original
    return version
