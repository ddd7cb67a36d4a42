"""Celery's tasks of ingestion; queue `ingest`."""

from __future__ import annotations

import uuid

from celery import shared_task

from controlplane.adapters import deletion, ingest, orphaned_objects
from controlplane.infra.outages import DATABASE_OUTAGE, STORE_OUTAGE
from controlplane.tenancy.scoping import tenant_scope


@shared_task(
    name="controlplane.adapters.tasks.adapter_version_validate",
    autoretry_for=DATABASE_OUTAGE,
    retry_backoff=2,
    retry_backoff_max=60,
    max_retries=20,
)
def adapter_version_validate(tenant_id: str, version_id: str) -> None:
    """Check the version that is next: it may be another than the one that sent this message."""
    version = ingest.version_next()
    if version is None:
        return
    try:
        with tenant_scope(version.tenant_id):
            ingest.version_ingest(version.pk)
    except STORE_OUTAGE:
        # Retry this version by name: it is claimed, and no other message is for it.
        ids = (str(version.tenant_id), str(version.pk))
        adapter_version_validate_again.apply_async(ids, countdown=2)


@shared_task(
    name="controlplane.adapters.tasks.adapter_version_validate_again",
    autoretry_for=STORE_OUTAGE,
    retry_backoff=2,
    retry_backoff_max=60,
    max_retries=20,
)
def adapter_version_validate_again(tenant_id: str, version_id: str) -> None:
    """Check a version whose check began and was lost. Running it twice does no harm."""
    with tenant_scope(uuid.UUID(tenant_id)):
        ingest.version_ingest(uuid.UUID(version_id))


@shared_task(name="controlplane.adapters.tasks.adapter_versions_sweep")
def adapter_versions_sweep() -> None:
    """Queue lost checks, end unfinished uploads, remove orphaned objects."""
    ingest.versions_abandon()
    for version in ingest.versions_overdue():
        adapter_version_validate_again.delay(str(version.tenant_id), str(version.pk))
    orphaned_objects.versions_clear()
    orphaned_objects.staging_sweep()
    orphaned_objects.retired_remove()
    deletion.versions_remove()


@shared_task(name="controlplane.adapters.tasks.deleted_versions_remove", ignore_result=True)
def deleted_versions_remove() -> None:
    """Remove the bytes of deleted versions; what is still needed waits for the sweep."""
    deletion.versions_remove()
