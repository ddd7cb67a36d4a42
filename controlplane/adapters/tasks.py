"""The Celery side of ingestion; queue `ingest`."""

from __future__ import annotations

import uuid

from celery import shared_task
from django.db import InterfaceError, OperationalError

from controlplane.adapters import ingest, remains
from controlplane.scoping import tenant_scope
from controlplane.storage import STORAGE_ERRORS


@shared_task(
    autoretry_for=(*STORAGE_ERRORS, OperationalError, InterfaceError),
    retry_backoff=2,
    retry_backoff_max=60,
    max_retries=20,
)
def adapter_version_validate(tenant_id: str, version_id: str) -> None:
    """Check an uploaded version. Running it twice does no harm."""
    with tenant_scope(uuid.UUID(tenant_id)):
        ingest.version_ingest(uuid.UUID(version_id))


@shared_task
def adapter_versions_sweep() -> None:
    """Queue lost checks, end uploads that nobody finished, remove what versions left behind."""
    ingest.versions_abandon()
    for version in ingest.versions_overdue():
        adapter_version_validate.delay(str(version.tenant_id), str(version.pk))
    remains.versions_clear()
