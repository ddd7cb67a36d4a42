"""Check the two uploaded files of a version; make it ready, or reject it with reasons.

Every step may run again after a crash, and in two processes at once: files are stored under their
digest, so both write the same, and the row changes by compare-and-set. The accepted files are the
checked copy, not the staged objects: the client's URL can still overwrite those.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import logging
import uuid
from pathlib import Path
from typing import Any

from django.db import transaction
from django.utils import timezone

from contract.adapters.peft_config import FILE as _CONFIG
from contract.adapters.peft_config import load_json
from contract.adapters.safetensors_header import FILE as _TENSORS
from contract.messages.protocol import adapter_digest_of
from controlplane.adapters import orphaned_objects, probing, promotion, uploads
from controlplane.adapters.file_check import Accepted, files_check
from controlplane.adapters.models import AdapterVersion, VersionImport, VersionUpload
from controlplane.adapters.probing import Facts
from controlplane.adapters.rejection import Rejected
from controlplane.events.audit.services import record
from controlplane.events.outbox.models import EventType
from controlplane.events.outbox.services import publish
from controlplane.infra import storage
from controlplane.infra.temp_folders import scratch_folder
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.usage.limits import turns
from controlplane.usage.limits.models import Turn

log = logging.getLogger(__name__)

Status = AdapterVersion.Status

_OVERDUE = dt.timedelta(minutes=10)
_ABANDONED = dt.timedelta(days=1)
_SWEEP_SIZE = 500
_NOT_UPLOADED = "the files were not uploaded within a day"
_SENT_TOO_OFTEN = "its parts were sent too often: upload a new version"
_NOT_CHECKED = "the files could not be checked within a day: upload a new version"


def version_ingest(version_id: uuid.UUID) -> None:
    """Check the staged files of an uploaded version of the tenant in scope; accept or reject it."""
    rows = AdapterVersion.objects.filter(pk=version_id).select_related("adapter__base_model")
    version = rows.first()
    if version is None or version.status == Status.UPLOADING:
        return
    if version.move(Status.UPLOADED, Status.VALIDATING):
        version.status = Status.VALIDATING
    if version.status == Status.VALIDATING and (waits := probing.held(version)) is not None:
        if (facts := probing.facts_if_over(waits)) is not None:
            version_accept(version, facts)
    elif version.status == Status.VALIDATING:
        try:
            accepted = _check_and_keep(version)
        except Rejected as rejected:
            _reject(version, rejected)
        except storage.ObjectMissing:
            # Another process may have decided, or held it for its probe, and cleared the staging
            # area; then this does nothing.
            if probing.held(version) is None:
                _reject(version, Rejected.because("", "a file is missing: upload a new version"))
        else:
            facts = _facts(version, accepted)
            if not (probing.hold(version, facts) or version_accept(version, facts)):
                # It was decided while the files were stored.
                orphaned_objects.kept_forget(version, version.digest)
    orphaned_objects.staging_clear(version)


def version_next() -> AdapterVersion | None:
    """Claim the version to check next, of all tenants; None when none waits."""
    while True:
        with all_tenants(reason="the next check is chosen among all tenants"):
            waiting = AdapterVersion.objects.filter(status=Status.UPLOADED)
            version = turns.next_of(Turn.Kind.ADAPTER_CHECK, waiting)
        if version is None:
            return None
        with tenant_scope(version.tenant_id), transaction.atomic():
            if version.move(Status.UPLOADED, Status.VALIDATING):  # else another was faster
                turns.taken(Turn.Kind.ADAPTER_CHECK)
                return version


def versions_overdue() -> list[AdapterVersion]:
    """Return the versions of all tenants whose check was lost, each once per `_OVERDUE`.

    Its message was lost, or its worker died: the broker redelivers such a message only after many
    hours.
    """
    now = timezone.now()
    with all_tenants(reason="find lost checks of all tenants"):
        overdue = AdapterVersion.objects.filter(
            status__in=[Status.UPLOADED, Status.VALIDATING], status_changed_at__lt=now - _OVERDUE
        )
        return [
            version
            for version in overdue[:_SWEEP_SIZE]
            if overdue.filter(pk=version.pk).update(status_changed_at=now)
        ]


def versions_abandon() -> int:
    """Reject versions of all tenants that will not become ready. -> their number.

    They were not uploaded within a day, or not checked within two: such a check may crash the
    process that runs it. Or their parts were sent so often that they fill the store.
    """
    now = timezone.now()
    checks = (Status.UPLOADED, Status.VALIDATING)
    with all_tenants(reason="find unfinished uploads of all tenants"):
        rows = AdapterVersion.objects.order_by("created_at")
        never = rows.filter(status=Status.UPLOADING, created_at__lt=now - _ABANDONED)
        stuck = rows.filter(status__in=checks, created_at__lt=now - 2 * _ABANDONED)
        found = [(version, _NOT_UPLOADED) for version in never[:_SWEEP_SIZE]]
        found += [(version, _NOT_CHECKED) for version in stuck[:_SWEEP_SIZE]]
        begun = VersionUpload.objects.exclude(upload_id="").values("version_id")
        sending = rows.filter(status=Status.UPLOADING, pk__in=begun)
        # In random order, so that the oldest do not hide the others.
        sending_now = list(sending.order_by("?")[:_SWEEP_SIZE])
    for version in sending_now:
        with tenant_scope(version.tenant_id):
            if uploads.is_flooded(version):
                found.append((version, _SENT_TOO_OFTEN))
    return sum(version_drop(version, why) for version, why in found)


def version_drop(version: AdapterVersion, why: str | Rejected) -> bool:
    """Reject a version and remove its files. -> False when its status has changed since.

    Raises storage.STORAGE_ERRORS; then it is not rejected.
    """
    with tenant_scope(version.tenant_id):
        orphaned_objects.staging_clear(version)  # first: if the store fails, the version stays
        rejected = why if isinstance(why, Rejected) else Rejected.because("", why)
        return _reject(version, rejected, expected=Status(version.status))


def _check_and_keep(version: AdapterVersion) -> Accepted:
    """Check both files, set the version's digest, and store the checked bytes under it."""
    with scratch_folder("ingest-") as folder:
        _download(version, version.staged_config_key, folder / _CONFIG, version.config_num_bytes)
        tensors = _download(
            version, version.staged_tensors_key, folder / _TENSORS, version.num_bytes
        )
        accepted = files_check(version, folder / _CONFIG, folder / _TENSORS)
        # The check has accepted it, so this is a small object in JSON.
        config = (folder / _CONFIG).read_bytes()
        raw = load_json(config, version.config_num_bytes)
        revision = version.adapter.base_model.revision
        version.digest = adapter_digest_of(raw, tensors, revision)
        if not orphaned_objects.kept_note(version):
            return accepted  # it is already decided and will not be accepted
        storage.upload(folder / _TENSORS, version.tensors_key)
    storage.put_bytes(version.config_key, config)
    return accepted


def _download(version: AdapterVersion, key: str, path: Path, num_bytes: int) -> str:
    """Write a staged file to `path`, not more than stated. -> its sha256. Raises Rejected."""
    sha256, received = hashlib.sha256(), 0
    pieces = storage.read_pieces(key, max_bytes=num_bytes + 1)
    with path.open("wb") as file:
        for piece in uploads.verified(version, path.name, pieces):
            received += len(piece)
            sha256.update(piece)
            file.write(piece)
    if received != num_bytes:
        message = f"it does not have the {num_bytes} bytes that were stated"
        raise Rejected.because(path.name, message)
    return sha256.hexdigest()


@transaction.atomic
def _reject(
    version: AdapterVersion, rejected: Rejected, *, expected: Status = Status.VALIDATING
) -> bool:
    reasons = rejected.as_json()
    if not version.move(expected, Status.REJECTED, reasons=reasons):
        return False
    probing.note_released(version)
    VersionImport.objects.filter(version=version).delete()  # the row has secrets
    told = {"adapter": version.adapter.name, "version": version.number}
    publish(EventType.VERSION_REJECTED, **told, reasons=reasons)
    record("rejected", version, after={"reasons": reasons})
    log.info(
        "adapter version rejected",
        extra=_log_fields(version) | {"reasons": len(reasons)},  # they quote the files
    )
    return True


def version_reject_held(version: AdapterVersion, why: str) -> bool:
    """Reject a held version. -> False when it was decided already.

    The sweep removes its checked files a day later: until then a worker may still load them.
    """
    return _reject(version, Rejected.because("", why))


def _facts(version: AdapterVersion, accepted: Accepted) -> Facts:
    return Facts(digest=version.digest, max_rank=accepted.max_rank, report=accepted.report)


@transaction.atomic
def version_accept(version: AdapterVersion, facts: Facts) -> bool:
    """Make a checked version ready, and live if nobody has to decide.

    -> False when it was decided already.
    """
    # The lock orders two versions that become ready at the same time.
    adapter = promotion.lock(version.adapter_id)
    version.digest = facts.digest
    moved = orphaned_objects.is_kept(version) and version.move(
        Status.VALIDATING,
        Status.READY,
        digest=facts.digest,
        max_rank=facts.max_rank,
        report=facts.report,
        ready_at=timezone.now(),
    )
    if not moved:
        return False
    told = {"adapter": adapter.name, "version": version.number, "digest": facts.digest}
    publish(EventType.VERSION_READY, **told)
    probing.note_released(version)
    record("accepted", version, after={"digest": version.digest})
    promotion.ready_apply(adapter, version)
    log.info("adapter version ready", extra=_log_fields(version) | {"digest": version.digest})
    return True


def _log_fields(version: AdapterVersion) -> dict[str, Any]:
    name = version.adapter.name
    return {"version_id": str(version.pk), "adapter": name, "version": version.number}
