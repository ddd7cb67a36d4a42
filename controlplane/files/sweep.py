"""Removes what has expired and what was left half-done, of every tenant, in small steps."""

from __future__ import annotations

import datetime as dt
import logging

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.audit.services import record
from controlplane.files import services
from controlplane.files.models import File, Upload, UploadPart
from controlplane.infra import storage
from controlplane.tenancy.scoping import all_tenants, tenant_scope

log = logging.getLogger(__name__)

#: Nothing takes longer than this to be written; the store keeps its parts for so long.
ABANDONED_AFTER = dt.timedelta(hours=3)
#: Removed in one turn; the next one goes on.
MAX_PER_TURN = 1000


def files_sweep() -> None:
    """One turn. What the store refuses now, a later turn removes."""
    now = timezone.now()
    _expire_files(now)
    _drop_unready(now)
    _give_up_parts(now)
    _expire_uploads(now)
    storage.abort_old_parts(before=now - ABANDONED_AFTER)


def _expire_files(now: dt.datetime) -> None:
    """Ready files past their time, once nothing reads them; each is deleted as its owner would."""
    with all_tenants(reason="files of every tenant grow old"):
        rows = File.objects.filter(status=File.Status.READY, expires_at__lte=now)
        due = list(rows.exclude(services.is_read())[:MAX_PER_TURN])
    for file in due:
        with tenant_scope(file.tenant_id):
            services.file_expire(file)


def _drop_unready(now: dt.datetime) -> None:
    """Files that never came, and those whose deletion was cut off."""
    abandoned = Q(status=File.Status.UPLOADING, alive_at__lte=now - services.SILENCE)
    with all_tenants(reason="files of every tenant are left half-done"):
        deleted = Q(status=File.Status.DELETING) & ~services.is_read()
        rows = File.objects.filter(abandoned | deleted)
        due = list(rows.order_by("created_at")[:MAX_PER_TURN])
    for file in due:
        with tenant_scope(file.tenant_id):
            services.file_drop(file)


def _give_up_parts(now: dt.datetime) -> None:
    """Parts that never came whole; their uploads may go on."""
    is_silent = Q(alive_at__lte=now - services.SILENCE) | Q(alive_at=None)
    with all_tenants(reason="parts of every tenant's uploads are left half-done"):
        rows = UploadPart.objects.filter(is_silent, is_ready=False)
        due = list(rows.order_by("created_at")[:MAX_PER_TURN])
    for part in due:
        with tenant_scope(part.tenant_id):
            services.part_give_up(part)


def _expire_uploads(now: dt.datetime) -> None:
    """Uploads past their hour, and the parts of those that ended."""
    is_over = Q(status__in=services.PENDING, expires_at__lte=now)
    has_parts = Q(parts__isnull=False) & ~Q(status__in=services.PENDING)
    with all_tenants(reason="uploads of every tenant grow old"):
        due = list(Upload.objects.filter(is_over | has_parts).distinct()[:MAX_PER_TURN])
    for upload in due:
        with tenant_scope(upload.tenant_id):
            upload = services.upload_get(upload.public_id)  # one that was left half-done is pending
            with transaction.atomic():
                pending = Upload.objects.filter(pk=upload.pk, status=Upload.Status.PENDING)
                if pending.filter(expires_at__lte=now).update(status=Upload.Status.EXPIRED):
                    record("expired", upload)
            if Upload.objects.get(pk=upload.pk).status not in services.PENDING:
                services.parts_drop(upload)
