"""Every change to batches that a client asks for. All act for the tenant in scope."""

from __future__ import annotations

import datetime as dt

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.errors import Conflict, InvalidRequest, RateLimited, require
from controlplane.events.audit.services import record
from controlplane.files.batches.lines import ENDPOINTS
from controlplane.files.batches.models import Batch
from controlplane.files.models import Purpose
from controlplane.files.services import file_get
from controlplane.tenancy.model_scope import current_bounds
from controlplane.tenancy.public_ids import parse_id
from controlplane.tenants.auth import Principal

WINDOW = dt.timedelta(hours=24)
#: Largest number of a tenant's batches that have not ended.
MAX_ACTIVE = 500


@transaction.atomic
def batch_create(
    *,
    principal: Principal,
    input_file_id: str,
    endpoint: str,
    metadata: dict[str, str] | None = None,
    output_expires_s: int | None = None,
) -> Batch:
    """Have a file of requests answered within a day; a runner checks it first.

    Raises InvalidRequest, NotFound for the file, RateLimited.
    """
    if endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
    file = file_get(input_file_id, param="input_file_id")
    if file.purpose != Purpose.BATCH:
        raise InvalidRequest(
            f"The file has the purpose {file.purpose}: upload it with purpose "
            f"{Purpose.BATCH.value}.",
            param="input_file_id",
        )
    if Batch.objects.filter(status__in=Batch.ACTIVE).count() >= MAX_ACTIVE:
        raise RateLimited(
            f"You have {MAX_ACTIVE} batches under way, the limit: wait until one ends.",
            retry_after_s=60,
        )
    batch = Batch.objects.create(
        api_key=principal.api_key,
        pool=settings.POOL,
        endpoint=endpoint,
        input_file_id=file.pk,
        metadata=metadata,
        output_expires_s=output_expires_s,
        expires_at=timezone.now() + WINDOW,
    )
    record("created", batch, after={"endpoint": endpoint, "input_file": file.public_id})
    return batch


def batches_list() -> QuerySet[Batch]:
    """Return the tenant's batches that the caller may see.

    A bound key sees those of its models, and those that it made.
    """
    bounds = current_bounds()
    if bounds is None:
        return Batch.objects.all()
    return Batch.objects.allowed() | Batch.objects.filter(api_key_id=bounds.key_id)


def batch_get(public_id: str) -> Batch:
    """Return the batch of this id. Raises NotFound."""
    pk = parse_id(Batch.PREFIX, public_id)
    return require(batches_list().filter(pk=pk).first() if pk else None, "There is no such batch.")


@transaction.atomic
def batch_cancel(batch: Batch) -> Batch:
    """Stop a batch; seconds later its files have the answers so far.

    Raises Conflict when it has ended, or is about to.
    """
    stoppable = (Batch.Status.VALIDATING, Batch.Status.IN_PROGRESS)
    moved = Batch.objects.filter(pk=batch.pk, status__in=stoppable).update(
        status=Batch.Status.CANCELLING,
        ends_as=Batch.Status.CANCELLED,
        cancelling_at=timezone.now(),
    )
    current = batch_get(batch.public_id)
    if moved:
        record("cancelled", current)
    elif current.status not in (Batch.Status.CANCELLING, Batch.Status.CANCELLED):
        raise Conflict(f"A batch that is {current.status} cannot be cancelled.")
    return current
