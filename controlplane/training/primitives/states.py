"""The files of clients' states in the object store, and their part of the tenant's storage."""

from __future__ import annotations

import datetime as dt
import uuid
from pathlib import Path
from typing import Any

from django.db import transaction
from django.db.models import Sum
from django.utils import timezone

from controlplane.infra import storage
from controlplane.tenancy.scoping import all_tenants, new_id, tenant_scope
from controlplane.training.primitives.models import ClientState, TrainingClient
from controlplane.usage.limits import quotas

#: Time after a client's last call for which its state, which nobody saved, is kept.
KEPT = dt.timedelta(days=7)
#: Age of a file without a row after which no trainer is about to write its row.
_ORPHAN_AGE = dt.timedelta(hours=6)
#: States that one sweep removes.
_MAX_PER_SWEEP = 1000
#: More than any state has.
_MAX_BYTES = 1 << 36
_SUFFIX = ".safetensors"


def storage_used() -> int:
    """Return the bytes of the states of the tenant in scope."""
    saved = ClientState.objects.aggregate(sum=Sum("num_bytes"))["sum"] or 0
    return int(saved + (TrainingClient.objects.aggregate(sum=Sum("state_bytes"))["sum"] or 0))


def store(client: TrainingClient, path: Path) -> str:
    """Send a file to the store. -> its key. Raises storage.STORAGE_ERRORS."""
    key = f"{_prefix(client.tenant_id)}{client.pk}/{new_id()}{_SUFFIX}"
    storage.upload(path, key)
    return key


def fetch(key: str, path: Path) -> None:
    """Write what is under a key to a file. Raises storage.ObjectMissing, storage.STORAGE_ERRORS."""
    with path.open("wb") as file:
        file.writelines(storage.read_pieces(key, max_bytes=_MAX_BYTES))


@transaction.atomic
def state_save(
    client: TrainingClient, name: str, key: str, num_bytes: int, expires_at: dt.datetime | None
) -> tuple[ClientState, str]:
    """Count a stored state, in place of one of the same name. -> the state, and the key of that.

    Raises InvalidRequest where the tenant's storage has no room.
    """
    quotas.check("storage_bytes", num_bytes)
    own: dict[str, Any] = {"client": client, "kind": ClientState.Kind.WEIGHTS, "name": name}
    before = ClientState.objects.filter(**own).values_list("key", flat=True).first()
    said = {"key": key, "num_bytes": num_bytes, "expires_at": expires_at}
    state, _ = ClientState.objects.update_or_create(**own, defaults=said)
    return state, before or ""


def sweep() -> None:
    """Remove the states that have expired, and those of clients that nobody used for a week."""
    now = timezone.now()
    with all_tenants(reason="the states that expired are of all tenants"):
        expired = list(ClientState.objects.filter(expires_at__lt=now)[:_MAX_PER_SWEEP])
        idle = TrainingClient.objects.filter(used_at__lt=now - KEPT).exclude(state_key="")
        idle_ones = list(idle.order_by("used_at")[:_MAX_PER_SWEEP])
        tenants = set(
            TrainingClient.objects.filter(used_at__gt=now - KEPT).values_list(
                "tenant_id", flat=True
            )
        )
    for state in expired:
        with tenant_scope(state.tenant_id):
            state_delete(state)
    for client in idle_ones:
        with tenant_scope(client.tenant_id):
            storage.delete([client.state_key])
            own = TrainingClient.objects.filter(pk=client.pk, state_key=client.state_key)
            own.update(state_key="", state_bytes=0, is_lost=True)

    for tenant_id in tenants:
        with tenant_scope(tenant_id):
            _remove_orphans(tenant_id, now - _ORPHAN_AGE)


def _remove_orphans(tenant_id: uuid.UUID, before: dt.datetime) -> None:
    """Remove files that no row has: their trainer died before it was written.

    Their names are UUIDs of version 7, which begin with the time.
    """
    least = int(before.timestamp() * 1000)
    old = [
        key
        for key in storage.keys(_prefix(tenant_id))
        if uuid.UUID(key.rpartition("/")[2].removesuffix(_SUFFIX)).int >> 80 < least
    ]
    known = set(TrainingClient.objects.values_list("state_key", flat=True))
    known |= set(ClientState.objects.values_list("key", flat=True))
    storage.delete([key for key in old if key not in known])


def _prefix(tenant_id: uuid.UUID) -> str:
    return f"t/{tenant_id}/primitives/"


def state_delete(state: ClientState) -> None:
    """Remove a state and its file; a version stays until its adapter is deleted."""
    if state.key:
        storage.delete([state.key])
    state.delete()
