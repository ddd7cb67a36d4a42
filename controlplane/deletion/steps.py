"""The steps of a tenant's deletion. Each may be killed anywhere and run again.

They run in the tenant's scope, in the order of `STEPS`. What they delete they add to the counts of
the record, in the transaction that deletes it; objects of the store page by page.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from allauth.usersessions.models import UserSession
from django.apps import apps
from django.conf import settings
from django.contrib.sessions.models import Session
from django.db import models, transaction
from django.utils import timezone

from contract.messages import protocol
from contract.queue import fair_queue
from controlplane.adapters import deletion as adapters
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel, DeletedVersion
from controlplane.aliases.models import AliasRevision, is_current
from controlplane.deletion.models import TenantDeletion
from controlplane.errors import Conflict
from controlplane.events.audit.models import AuditEvent
from controlplane.events.audit.services import record
from controlplane.files.batches.models import Batch
from controlplane.files.batches.services import batch_cancel
from controlplane.infra import storage
from controlplane.infra.redis_client import redis_client
from controlplane.tenancy.scoping import TenantModel, all_tenants, tenant_scope
from controlplane.tenants.models import Membership, Tenant, User
from controlplane.training.models import Schedule, TrainingRun
from controlplane.training.primitives import calls
from controlplane.training.runs import services as run_services
from controlplane.training.schedules import services as schedule_services
from controlplane.usage.models import TrainingUsage, UsageDay
from controlplane.usage.totals import usage_forget_names
from controlplane.usage.training import training_usage_forget_names

#: Time that running work has to end.
PATIENCE = dt.timedelta(minutes=15)
_ROWS = 1000
_OBJECTS = 500
_SCAN = 1000
_T = TypeVar("_T")

#: Tables whose rows stay after a deletion, and why.
KEPT: dict[type[TenantModel], str] = {
    AuditEvent: "the trail is a chain of hashes: nobody can take events out",
    TrainingUsage: "bills: tokens and seconds of trainings, without names of adapters",
    UsageDay: "bills: tokens by day and base model, without names of adapters and keys",
}

#: Note that the task is alive, between two pieces of a step.
Beat = Callable[[], None]


class NotYet(Exception):
    """The step waits for something; the next turn continues."""


def work_end(deletion: TenantDeletion, beat: Beat) -> None:
    """Cancel runs and batches, delete schedules, and wait for running requests."""
    for run in TrainingRun.objects.filter(status__in=TrainingRun.ACTIVE, cancel_requested=False):
        with contextlib.suppress(Conflict):  # it publishes, and ends soon
            run_services.training_run_cancel(run=run)
    for schedule in Schedule.objects.select_related("adapter", "dataset"):
        schedule_services.schedule_delete(adapter=schedule.adapter)
    for batch in Batch.objects.filter(status__in=Batch.ACTIVE):
        with contextlib.suppress(Conflict):  # it writes its files, and ends soon
            batch_cancel(batch)
    beat()
    assert deletion.started_at is not None
    if timezone.now() - deletion.started_at < PATIENCE and _is_busy(deletion):
        raise NotYet


def _is_busy(deletion: TenantDeletion) -> bool:
    if TrainingRun.objects.filter(status__in=TrainingRun.ACTIVE).exists():
        return True
    if Batch.objects.filter(status__in=Batch.ACTIVE).exists():
        return True
    with redis_client() as client:
        return any(state != b"done" for _, state in _jobs(client, deletion))


def people_remove(deletion: TenantDeletion, beat: Beat) -> None:
    """End all memberships, and delete the people who belong to nothing else."""
    for membership in Membership.objects.select_related("user"):
        beat()
        with transaction.atomic():
            user = User.objects.select_for_update().get(pk=membership.user_id)
            membership.delete()
            deletion.count("tenants_membership", 1)
            with all_tenants(reason="a person may belong to other tenants"):
                if not user.is_staff and not Membership.objects.filter(user=user).exists():
                    sessions = UserSession.objects.filter(user=user).values("session_key")
                    Session.objects.filter(session_key__in=sessions).delete()
                    record("deleted", user)
                    user.delete()
                    deletion.count("people", 1)
            deletion.save(update_fields=["counts"])


def workers_tell(deletion: TenantDeletion, beat: Beat) -> None:
    """Have the workers drop the tenant's adapters from disk, host memory and GPU pages."""
    rows = (AdapterVersion.objects.all(), DeletedVersion.objects.all())
    digests = {digest for found in rows for digest in found.values_list("digest", flat=True)}
    for some in _pieces(sorted(digests - {""})):
        adapters.workers_forget(some, except_of=deletion.tenant_id)
        beat()


def _pieces(items: list[_T]) -> Iterator[list[_T]]:
    for start in range(0, len(items), _SCAN):
        yield items[start : start + _SCAN]


def objects_delete(deletion: TenantDeletion, beat: Beat) -> None:
    """Delete every object and every unfinished write under the tenant's prefix."""
    prefix = prefix_of(deletion)
    storage.abort_parts(prefix)
    while page := list(itertools.islice(storage.objects(prefix), _OBJECTS)):
        storage.delete([stored.key for stored in page])
        deletion.count("objects", len(page))
        deletion.num_bytes += sum(stored.num_bytes for stored in page)
        deletion.save(update_fields=["counts", "num_bytes"])
        beat()


def prefix_of(deletion: TenantDeletion) -> str:
    """Return the beginning of the keys of all the tenant's objects."""
    return f"t/{deletion.tenant_id}/"


def keys_delete(deletion: TenantDeletion, beat: Beat) -> None:
    """Delete the tenant's state in Redis: limits, budgets, ended requests, its place in queues."""
    tenant = str(deletion.tenant_id)
    with redis_client() as client:
        # Keys of all pools that have the tenant's id; its queues empty themselves.
        patterns = (
            fair_queue.limit_key("*", tenant, "*"),
            fair_queue.budget_key("*", tenant, "*", "*"),
        )
        found = [key for pattern in patterns for key in _scan(client, pattern)]
        found += [key for key, state in _jobs(client, deletion) if state == b"done"]
        for some in _pieces(found):
            client.delete(*some)
            beat()
        queue = fair_queue.queue_key(settings.POOL, "*") + ":*"
        for key in _scan(client, queue + fair_queue.LATELY):
            client.zrem(key, tenant)
        for key in _scan(client, queue + fair_queue.SKIPS):
            client.hdel(key, tenant)
        letters = protocol.dead_letter_key(settings.POOL)
        for entry_id, fields in client.xrange(letters):
            if tenant.encode() in fields.get(protocol.PAYLOAD_FIELD, b""):
                client.xdel(letters, entry_id)
    deletion.count("redis_keys", len(found) + calls.forget(deletion.tenant_id))
    deletion.save(update_fields=["counts"])


def _scan(client: Any, pattern: str) -> Iterator[bytes]:
    # Braces are no special characters of Redis's patterns.
    yield from client.scan_iter(match=pattern, count=_SCAN)


def _jobs(client: Any, deletion: TenantDeletion) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield key and state of the tenant's requests."""
    tenant = str(deletion.tenant_id).encode()
    for key in _scan(client, protocol.job_key(settings.POOL, "*")):
        owner, state = client.hmget(key, "tenant", "state")
        if owner == tenant:
            yield key, state


def usage_sum_up(deletion: TenantDeletion, beat: Beat) -> None:
    """Keep the totals that bills need: tokens by day and base model."""
    current = AliasRevision.objects.filter(is_current())
    bases = dict(current.values_list("alias__name", "base_model__name"))
    bases |= dict(Adapter.objects.values_list("name", "base_model__name"))
    usage_forget_names(bases, BaseModel.objects.values_list("name", flat=True))
    training_usage_forget_names()


def rows_delete(deletion: TenantDeletion, beat: Beat) -> None:
    """Delete the tenant's rows in every table but `KEPT`."""
    Adapter.objects.update(live_version=None)  # the only circular reference
    for model in tenant_models():
        while True:
            beat()
            with transaction.atomic():
                keys = list(model.objects.values_list("pk", flat=True)[:_ROWS])
                _, by_table = model.objects.filter(pk__in=keys).delete()
                for label, number in by_table.items():
                    deletion.count(apps.get_model(label)._meta.db_table, number)
                deletion.save(update_fields=["counts"])
            if len(keys) < _ROWS:
                break


def tenant_models() -> list[type[TenantModel]]:
    """Return the tables whose rows are deleted; one that refers to another comes first."""
    left = {
        model
        for model in apps.get_models()
        if issubclass(model, TenantModel) and model not in KEPT and model._meta.managed
    }
    ordered: list[type[TenantModel]] = []
    while left:
        targets = {target for model in left for target in _references(model) if target is not model}
        free = sorted(left - targets, key=lambda model: model._meta.label)
        free = free or [Adapter]  # which refers to its live version; that is set to null first
        ordered += free
        left -= set(free)
    return ordered


def _references(model: type[models.Model]) -> set[Any]:
    fields = model._meta.local_concrete_fields
    return {field.related_model for field in fields if isinstance(field, models.ForeignKey)}


def tombstone_set(deletion: TenantDeletion, beat: Beat) -> None:
    """Take the tenant's name and settings from its row, which the kept totals refer to."""
    Tenant.objects.filter(pk=deletion.tenant_id).update(
        slug=f"deleted-{deletion.tenant_id.hex}",
        name="Deleted tenant",
        status=Tenant.Status.DELETED,
        allowed_origins=[],
        requires_second_factor=False,
    )


Step = Callable[[TenantDeletion, Beat], None]
STEPS: dict[str, Step] = {
    "work": work_end,
    "people": people_remove,
    "workers": workers_tell,
    "objects": objects_delete,
    "redis": keys_delete,
    "usage": usage_sum_up,
    "rows": rows_delete,
    "tombstone": tombstone_set,
}
#: Repeated for a while after the end: for late uploads, and records of requests that ended late.
LATE_STEPS = ("objects", "redis", "usage", "rows")


def run_step(name: str, deletion: TenantDeletion, beat: Beat) -> None:
    """Run a step in the scope of the tenant."""
    with tenant_scope(deletion.tenant_id):
        STEPS[name](deletion, beat)
