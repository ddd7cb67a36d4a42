"""Celery's tasks of ingestion; queue `ingest`."""

from __future__ import annotations

import logging
import uuid

from celery import shared_task

from controlplane.adapters import deletion, fetching, ingest, orphaned_objects, retirement
from controlplane.infra import sealed_child
from controlplane.infra.outages import DATABASE_OUTAGE, STORE_OUTAGE
from controlplane.tenancy.scoping import tenant_scope

log = logging.getLogger(__name__)

#: Errors after which the same check may succeed.
_AGAIN = (*STORE_OUTAGE, sealed_child.Lost)


@shared_task(
    autoretry_for=DATABASE_OUTAGE,
    retry_backoff=2,
    retry_backoff_max=60,
    max_retries=20,
)
def adapter_version_validate(tenant_id: str, version_id: str) -> None:
    """Check the next version, which may not be the one that sent this message."""
    version = ingest.version_next()
    if version is None:
        return
    try:
        with tenant_scope(version.tenant_id):
            ingest.version_ingest(version.pk)
    except _AGAIN:
        # Retry this version by name: it is claimed, and no other message is for it.
        ids = (str(version.tenant_id), str(version.pk))
        adapter_version_validate_again.apply_async(ids, countdown=2)


@shared_task(
    autoretry_for=_AGAIN,
    retry_backoff=2,
    retry_backoff_max=60,
    max_retries=20,
)
def adapter_version_validate_again(tenant_id: str, version_id: str) -> None:
    """Check a version whose check began and was lost. Running it twice does no harm."""
    with tenant_scope(uuid.UUID(tenant_id)):
        ingest.version_ingest(uuid.UUID(version_id))


@shared_task
def adapter_imports_run() -> None:
    """Do the import that is next; another message follows while there are more."""
    try:
        done = fetching.import_next()
        if done is None:
            return  # the running task sends the next message, and so does the sweep
        if done.is_fetched:
            version = done.version
            adapter_version_validate.delay(str(version.tenant_id), str(version.pk))
        wait_s = fetching.next_in_s()
    except STORE_OUTAGE:
        log.warning("an import waits: the database or the object store does not answer")
        wait_s = fetching.RETRY_AFTER.total_seconds()
    if wait_s is not None:
        adapter_imports_run.apply_async(countdown=wait_s)


@shared_task
def adapter_versions_sweep() -> None:
    """Queue lost checks, end unfinished uploads, retire versions, remove orphaned objects."""
    ingest.versions_abandon()
    for version in ingest.versions_overdue():
        adapter_version_validate_again.delay(str(version.tenant_id), str(version.pk))
    if fetching.next_in_s() == 0:
        adapter_imports_run.delay()
    retirement.versions_shut_down()
    orphaned_objects.versions_clear()
    orphaned_objects.staging_sweep()
    orphaned_objects.retired_remove()
    deletion.versions_remove()


@shared_task(ignore_result=True)
def deleted_versions_remove() -> None:
    """Remove the bytes of deleted versions; what is still needed waits for the sweep."""
    deletion.versions_remove()
