"""Download the files of a version, as they were checked."""

from __future__ import annotations

import dataclasses
import datetime as dt

from django.db import transaction
from django.utils import timezone

from contract.adapters import peft_config, safetensors_header
from controlplane.adapters.models import AdapterVersion
from controlplane.errors import Conflict
from controlplane.events.audit.services import record
from controlplane.infra import storage

EXPIRES_S = 300

Status = AdapterVersion.Status


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class File:
    url: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """Temporary URLs of the files, by name; they need no key."""

    files: dict[str, File]
    expires_at: dt.datetime


@transaction.atomic
def version_download(*, version: AdapterVersion) -> Download:
    """Return URLs of a version's files, and record in the audit trail who asked.

    Raises Conflict for a version that has no files: not ready, or retired long ago.
    """
    if version.status not in (Status.READY, Status.RETIRED):
        raise Conflict(
            f"Version {version.number} is {version.status}: only checked files can be downloaded.",
            code="version_not_ready",
        )
    if version.removed_at is not None:
        raise Conflict(
            f"The files of version {version.number} were removed after it was retired.",
            code="files_removed",
        )
    stem = f"{version.adapter.name}-{version.number}"
    found = {
        name: File(
            url=storage.presign_get(key, filename=f"{stem}-{name}", expires_s=EXPIRES_S),
            num_bytes=num_bytes,
        )
        for name, key, num_bytes in (
            (peft_config.FILE, version.config_key, version.config_num_bytes),
            (safetensors_header.FILE, version.tensors_key, version.num_bytes),
        )
    }
    record("downloaded", version, after={"adapter": version.adapter.name, "number": version.number})
    return Download(files=found, expires_at=timezone.now() + dt.timedelta(seconds=EXPIRES_S))
