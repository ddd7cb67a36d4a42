"""Check the two uploaded files of a version; make it ready, or reject it with reasons.

Every step may run again after a crash, and in two processes at once: files are stored under their
digest, so both write the same, and the row changes by compare-and-set. The accepted files are the
checked copy, not the staged objects: the client's URL can still overwrite those.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from django.db import transaction
from django.utils import timezone

from contract import peft_config, safetensors_header
from contract.adapter_problems import shown
from contract.base_shape import BaseShape
from contract.protocol import adapter_digest
from contract.safetensors_header import LENGTH_BYTES
from controlplane.adapters import orphaned_objects, promotion, tensor_file
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.adapters.rejection import Reason, Rejected
from controlplane.adapters.validation import CheckedAdapter, check_adapter
from controlplane.audit.services import record
from controlplane.infra import storage
from controlplane.infra.temp_folders import scratch_folder
from controlplane.limits import turns
from controlplane.limits.models import Turn
from controlplane.tenancy.scoping import all_tenants, tenant_scope

log = logging.getLogger(__name__)

Status = AdapterVersion.Status

_OVERDUE = dt.timedelta(minutes=10)
_ABANDONED = dt.timedelta(days=1)
_SWEEP_SIZE = 500
_NOT_UPLOADED = "the files were not uploaded within a day"
_NOT_CHECKED = "the files could not be checked within a day: upload a new version"


def version_ingest(version_id: uuid.UUID) -> None:
    """Check the staged files of an uploaded version of the tenant in scope; accept or reject it."""
    rows = AdapterVersion.objects.filter(pk=version_id).select_related("adapter__base_model")
    version = rows.first()
    if version is None or version.status == Status.UPLOADING:
        return
    if version.move(Status.UPLOADED, Status.VALIDATING):
        version.status = Status.VALIDATING
    if version.status == Status.VALIDATING:
        try:
            checked = _check_and_keep(version)
        except Rejected as rejected:
            _reject(version, rejected)
        except storage.ObjectMissing:
            # Another process may have decided and cleared the staging area; then this does nothing.
            _reject(version, Rejected.because("", "a file went missing: upload a new version"))
        else:
            if not _accept(version, checked):  # it was decided while the files were stored
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
    """Reject versions of all tenants that will not become ready. -> how many.

    They were not uploaded within a day, or not checked within two: such a check may crash the
    process that runs it.
    """
    now = timezone.now()
    checks = (Status.UPLOADED, Status.VALIDATING)
    with all_tenants(reason="find unfinished uploads of all tenants"):
        rows = AdapterVersion.objects.order_by("created_at")
        never = rows.filter(status=Status.UPLOADING, created_at__lt=now - _ABANDONED)
        stuck = rows.filter(status__in=checks, created_at__lt=now - 2 * _ABANDONED)
        found = [(version, _NOT_UPLOADED) for version in never[:_SWEEP_SIZE]]
        found += [(version, _NOT_CHECKED) for version in stuck[:_SWEEP_SIZE]]
    return sum(version_drop(version, why) for version, why in found)


def version_drop(version: AdapterVersion, why: str) -> bool:
    """Reject a version and remove its files. -> False when its status has changed since.

    Raises storage.STORAGE_ERRORS; then it is not rejected.
    """
    with tenant_scope(version.tenant_id):
        orphaned_objects.staging_clear(version)  # first: if the store fails, the version stays
        rejected = Rejected.because("", why)
        return _reject(version, rejected, expected=Status(version.status))


def _check_and_keep(version: AdapterVersion) -> CheckedAdapter:
    """Check both files, set the version's digest, and store the checked bytes under it."""
    base = version.adapter.base_model
    config = _read_exactly(peft_config.FILE, version.staged_config_key, version.config_num_bytes)
    checked = _check(version, config, _read_header(version))
    with _scratch_file() as file:
        version.digest = adapter_digest(checked.config.raw, _download(version, file), base.revision)
        file.flush()
        # Check again, on the bytes that are stored.
        file.seek(0)
        checked = _check(version, config, file.read(_header_end(checked)))
        _check_values(file, checked)
        if not orphaned_objects.kept_note(version):
            return checked  # it is already decided and will not be accepted
        storage.upload(Path(file.name), version.tensors_key)
    storage.put_bytes(version.config_key, config)
    return checked


@contextlib.contextmanager
def _scratch_file() -> Iterator[BinaryIO]:
    with (
        scratch_folder("ingest-") as folder,
        (folder / safetensors_header.FILE).open("w+b") as file,
    ):
        yield file


def _check(version: AdapterVersion, config: bytes, start: bytes) -> CheckedAdapter:
    base: BaseModel = version.adapter.base_model
    return check_adapter(
        config=config,
        start=start,
        file_bytes=version.num_bytes,
        base=BaseShape.from_config(base.config),
        max_rank=base.max_rank,
    )


def _check_values(file: BinaryIO, checked: CheckedAdapter) -> None:
    reasons = [
        Reason(shown(tensor.name), "it contains NaN or infinity: the training diverged")
        for tensor in tensor_file.tensors_with_nonfinite(file, checked.tensors)
    ]
    if reasons:
        raise Rejected(reasons)


def _read_exactly(file: str, key: str, num_bytes: int) -> bytes:
    data = storage.read_bytes(key, max_bytes=num_bytes + 1)
    if len(data) != num_bytes:
        raise Rejected.because(file, f"it does not have the {num_bytes} bytes that were stated")
    return data


def _read_header(version: AdapterVersion) -> bytes:
    """Return the tensors file up to the end of its header. Raises Rejected when it has none."""
    key = version.staged_tensors_key
    start = storage.read_bytes(key, max_bytes=LENGTH_BYTES)
    length = tensor_file.header_length(start, version.num_bytes)
    return storage.read_bytes(key, max_bytes=LENGTH_BYTES + length)


def _header_end(checked: CheckedAdapter) -> int:
    return checked.tensors[0].begin


def _download(version: AdapterVersion, file: BinaryIO) -> Iterator[bytes]:
    """Yield the tensors file in pieces and write each to `file`; stop after the stated length."""
    num_bytes = 0
    for piece in storage.read_pieces(version.staged_tensors_key, max_bytes=version.num_bytes + 1):
        num_bytes += len(piece)
        file.write(piece)
        yield piece
    if num_bytes != version.num_bytes:
        raise Rejected.because(
            safetensors_header.FILE,
            f"it does not have the {version.num_bytes} bytes that were stated",
        )


@transaction.atomic
def _reject(
    version: AdapterVersion, rejected: Rejected, *, expected: Status = Status.VALIDATING
) -> bool:
    reasons = rejected.as_json()
    if not version.move(expected, Status.REJECTED, reasons=reasons):
        return False
    record("rejected", version, after={"reasons": reasons})
    log.info(
        "adapter version rejected",
        extra=_log_fields(version) | {"reasons": len(reasons)},  # they quote the files
    )
    return True


@transaction.atomic
def _accept(version: AdapterVersion, checked: CheckedAdapter) -> bool:
    """Make the version ready, and live if nobody has to decide. -> False when it was decided."""
    # The lock orders two versions that become ready at the same time.
    adapter = promotion.lock(version.adapter_id)
    moved = orphaned_objects.is_kept(version) and version.move(
        Status.VALIDATING,
        Status.READY,
        digest=version.digest,
        max_rank=max(checked.fitted.ranks),
        report=checked.report(),
        ready_at=timezone.now(),
    )
    if not moved:
        return False
    record("accepted", version, after={"digest": version.digest})
    promotion.ready_apply(adapter, version)
    log.info("adapter version ready", extra=_log_fields(version) | {"digest": version.digest})
    return True


def _log_fields(version: AdapterVersion) -> dict[str, Any]:
    name = version.adapter.name
    return {"version_id": str(version.pk), "adapter": name, "version": version.number}
