"""Remove expired and abandoned files of all tenants, in small steps."""

from __future__ import annotations

import datetime as dt
import logging

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.events.audit.services import record
from controlplane.files import services
from controlplane.files.models import File, Upload, UploadPart
from controlplane.infra import storage
from controlplane.tenancy.scoping import all_tenants, tenant_scope

log = logging.getLogger(__name__)

#: No file takes longer than this to write; older multipart uploads are aborted.
ABANDONED_AFTER = dt.timedelta(hours=3)
#: Number of files removed in one sweep; the next one continues.
MAX_PER_TURN = 1000


def files_sweep() -> None:
    """Run one sweep. A later one repeats removals that fail now."""
    now = timezone.now()
    _expire_files(now)
    _drop_unready(now)
    _give_up_parts(now)
    _expire_uploads(now)
    storage.abort_old_parts(before=now - ABANDONED_AFTER)


def _expire_files(now: dt.datetime) -> None:
    """Delete expired files that nothing reads."""
    with all_tenants(reason="find expired files of all tenants"):
        rows = File.objects.filter(status=File.Status.READY, expires_at__lte=now)
        due = list(rows.exclude(services.is_read())[:MAX_PER_TURN])
    for file in due:
        with tenant_scope(file.tenant_id):
            services.file_expire(file)


def _drop_unready(now: dt.datetime) -> None:
    """Remove files that were never completed, and those whose deletion was interrupted."""
    abandoned = Q(status=File.Status.UPLOADING, alive_at__lte=now - services.SILENCE)
    with all_tenants(reason="find abandoned files of all tenants"):
        deleted = Q(status=File.Status.DELETING) & ~services.is_read()
        rows = File.objects.filter(abandoned | deleted)
        due = list(rows.order_by("created_at")[:MAX_PER_TURN])
    for file in due:
        with tenant_scope(file.tenant_id):
            services.file_drop(file)


def _give_up_parts(now: dt.datetime) -> None:
    """Remove parts that were never completed; their uploads may continue."""
    is_silent = Q(alive_at__lte=now - services.SILENCE) | Q(alive_at=None)
    with all_tenants(reason="find abandoned parts of all tenants"):
        rows = UploadPart.objects.filter(is_silent, is_ready=False)
        due = list(rows.order_by("created_at")[:MAX_PER_TURN])
    for part in due:
        with tenant_scope(part.tenant_id):
            services.part_give_up(part)


def _expire_uploads(now: dt.datetime) -> None:
    """Expire uploads, and remove the parts of those that have ended."""
    is_over = Q(status__in=services.PENDING, expires_at__lte=now)
    has_parts = Q(parts__isnull=False) & ~Q(status__in=services.PENDING)
    with all_tenants(reason="find expired uploads of all tenants"):
        due = list(Upload.objects.filter(is_over | has_parts).distinct()[:MAX_PER_TURN])
    for upload in due:
        with tenant_scope(upload.tenant_id):
            upload = services.upload_get(upload.public_id)  # reopens an abandoned one
            with transaction.atomic():
                pending = Upload.objects.filter(pk=upload.pk, status=Upload.Status.PENDING)
                if pending.filter(expires_at__lte=now).update(status=Upload.Status.EXPIRED):
                    record("expired", upload)
            if Upload.objects.get(pk=upload.pk).status not in services.PENDING:
                services.parts_drop(upload)
