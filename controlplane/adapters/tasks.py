"""The Celery side of ingestion; queue `ingest`."""

from __future__ import annotations

import uuid

from celery import shared_task
from django.db import InterfaceError, OperationalError

from controlplane.adapters import ingest
from controlplane.scoping import tenant_scope
from controlplane.storage import STORAGE_ERRORS


# Acknowledged when it ends, so a killed worker's task is run again by another.
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
