"""Bring a tenant to the state that a document describes, in one transaction.

Parts that the document leaves out stay as they are; nothing is removed. The same document again
changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.adapters.models import Adapter
from controlplane.adapters.services import adapter_create
from controlplane.errors import ApiError, Conflict, InvalidRequest, NotFound, require
from controlplane.events.audit.services import record_named, recorded_at_end
from controlplane.infra.locks import lock_until_commit
from controlplane.operator.principal import OperatorPrincipal
from controlplane.operator.service_keys.auth import Operator
from controlplane.operator.service_keys.scopes import Scope
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants import key_grants, key_services, people, services
from controlplane.tenants.invite_mail import invite_send, invite_url
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import (
    SLUG_RULE,
    ApiKey,
    Invite,
    Membership,
    Role,
    Tenant,
    is_slug,
)
from controlplane.tenants.permissions import DEFAULT_SCOPES, DEVELOPER, Permission
from controlplane.tenants.roles import PERMISSIONS
from controlplane.training.models import Schedule
from controlplane.training.runs.hyperparameters import checked_hyperparameters
from controlplane.training.schedules.schedule_rules import settings_changed
from controlplane.training.schedules.services import schedule_set
from controlplane.usage.limits import quotas
from controlplane.usage.limits.models import RateLimit, TenantQuota
from controlplane.usage.limits.services import rate_limit_set

#: Scope that a part of the document needs besides `tenants:write`.
PART_SCOPES = {
    "keys": Scope.KEYS_WRITE,
    "adapters": Scope.ADAPTERS_WRITE,
    "schedules": Scope.TRAINING_WRITE,
}
#: Roles that a document may give to keys: a key without owner can do what a developer can.
KEY_ROLES = (Role.DEVELOPER, Role.VIEWER)

_Document = Mapping[str, Any]


class Result(enum.StrEnum):
    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The result of one part of the document."""

    path: str
    name: str
    result: Result


@dataclasses.dataclass(slots=True)
class Provisioned:
    """The outcome. `tenant` is None in a dry run if there is no such tenant."""

    is_dry_run: bool
    tenant: Tenant | None = None
    parts: list[Part] = dataclasses.field(default_factory=list)
    #: The fields of the answer's `secrets`, for each new one.
    secrets: list[dict[str, str]] = dataclasses.field(default_factory=list)

    def add(self, path: str, name: str, result: Result) -> None:
        self.parts.append(Part(path, name, result))

    @property
    def changes(self) -> list[Part]:
        return [part for part in self.parts if part.result != Result.UNCHANGED]


@transaction.atomic
def tenant_provision(
    *, slug: str, document: _Document, by: Operator, is_dry_run: bool = False
) -> Provisioned:
    """Make or change a tenant and the document's other parts: completely, or not at all.

    document    the fields of `TenantDocumentSerializer`, checked
    is_dry_run  report the changes, and make none

    Raises PermissionDenied for a service key without the scope of a part, and InvalidRequest,
    Conflict and the other errors of each part, with the path of the field.
    """
    for part, scope in PART_SCOPES.items():
        if part in document:
            by.check(scope, param=part)
    if not is_slug(slug):
        raise InvalidRequest(SLUG_RULE, param="slug")
    outcome = Provisioned(is_dry_run)
    lock_until_commit(f"tenant document {slug}")
    # A savepoint of its own, because the caller's transaction may keep other changes.
    with transaction.atomic():
        with recorded_at_end() as events:
            tenant = _tenant(slug, document, outcome)
            with tenant_scope(tenant.id):
                _parts(tenant, document, by, outcome)
            if is_dry_run:
                events.clear()
            elif outcome.changes:
                _record(slug, outcome)
        if is_dry_run:
            transaction.set_rollback(True)
    if is_dry_run:
        outcome.secrets.clear()
        outcome.tenant = Tenant.objects.filter(slug=slug).first()
    return outcome


def _record(slug: str, outcome: Provisioned) -> None:
    """Add the changes to the platform's trail; the tenant's has each of them."""
    told = {part.path: f"{part.result} {part.name}" for part in outcome.changes}
    with all_tenants(reason="the platform's own trail"):
        record_named("provisioned", "tenant", slug, after=told)


def _parts(tenant: Tenant, document: _Document, by: Operator, outcome: Provisioned) -> None:
    if "owner" in document:
        with _field_of("owner"):
            _owner(tenant, document["owner"]["email"], by, outcome)
    entries: tuple[tuple[str, Callable[[str, _Document, Provisioned], None]], ...] = (
        ("keys", _key),
        ("adapters", _adapter),
        ("schedules", _schedule),
    )
    for part, write in entries:
        for index, entry in enumerate(document.get(part, ())):
            path = f"{part}[{index}]"
            with _field_of(path):
                write(path, entry, outcome)
        if part == "keys":  # quotas bound schedules
            _rates_and_quota(document, outcome)


def _rates_and_quota(document: _Document, outcome: Provisioned) -> None:
    if "limits" in document:
        known = RateLimit.objects.filter(api_key=None, model="").first()
        with _field_of("limits"):
            _numbers("limits", RateLimit.RATES, known, document, rate_limit_set, outcome)
    if "quota" in document:
        with _field_of("quota"):
            _numbers(
                "quota",
                TenantQuota.NAMES,
                TenantQuota.objects.first(),
                document,
                quotas.quota_set,
                outcome,
            )


@contextlib.contextmanager
def _field_of(path: str) -> Iterator[None]:
    """Let errors name the field of the document, also for a missing object that it names."""
    try:
        yield
    except NotFound as error:
        where = f"{path}.{error.param}" if error.param else path
        raise InvalidRequest(error.message, param=where, code="not_found") from error
    except ApiError as error:
        error.param = f"{path}.{error.param}" if error.param else path
        raise


def _tenant(slug: str, document: _Document, outcome: Provisioned) -> Tenant:
    tenant = Tenant.objects.select_for_update(no_key=True).filter(slug=slug).first()
    if tenant is not None:
        services.check_not_deleting(tenant)
    result = Result.UNCHANGED
    status = document.get("status")
    if tenant is None:
        tenant = services.tenant_create(slug=slug, name=document["name"])
        result = Result.CREATED
    elif tenant.name != document["name"] or status not in (None, tenant.status):
        tenant = services.tenant_update(tenant=tenant, name=document["name"])
        result = Result.CHANGED
    if status is not None:
        tenant = services.tenant_status_set(tenant=tenant, status=status)
    outcome.tenant = tenant
    outcome.add("tenant", slug, result)
    return tenant


def _owner(tenant: Tenant, email: str, by: Operator, outcome: Provisioned) -> None:
    """Invite the person as an owner, unless they are a member or had an invite.

    An invite that expired unused is renewed. One that was accepted or revoked is not: the tenant
    may have removed the person since.
    """
    email = email.strip().lower()
    invites = Invite.objects.filter(email=email)
    is_open = Q(expires_at__gt=timezone.now()) | ~Q(accepted_at=None) | ~Q(revoked_at=None)
    if Membership.objects.filter(user__email=email).exists() or invites.filter(is_open).exists():
        outcome.add("owner", email, Result.UNCHANGED)
        return
    principal = OperatorPrincipal.of(by, tenant, frozenset(Permission))
    invite, token = people.invite_create(by=principal, email=email, role=Role.OWNER)
    transaction.on_commit(lambda: invite_send(invite=invite, tenant=tenant, token=token))
    outcome.add("owner", email, Result.CREATED)
    outcome.secrets.append({"path": "owner", "name": email, "url": invite_url(token)})


def _key(path: str, entry: _Document, outcome: Provisioned) -> None:
    """Find the operators' key of this name, or make it. Revoked and expired keys do not count."""
    name = entry["name"]
    is_current = Q(expires_at=None) | Q(expires_at__gt=timezone.now())
    rows = ApiKey.objects.filter(is_current, owner=None, service_account=None, revoked_at=None)
    known = rows.filter(name=name).order_by("-created_at").first()
    wanted = _key_rules(entry, known)
    if known is None:
        api_key, text = key_services.api_key_create(
            name=name,
            expires_at=entry.get("expires_at"),
            environment=entry.get("environment", "live"),
            rules=wanted,
        )
        outcome.add(path, name, Result.CREATED)
        secret = {"path": path, "name": name, "public_id": api_key.public_id, "key": text}
        outcome.secrets.append(secret)
        return
    if entry.get("environment", known.environment) != known.environment:
        raise Conflict(
            f"This key is a {known.environment} key: choose another name.", param="environment"
        )
    changes = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(wanted)}
    changes["expires_at"] = entry.get("expires_at", known.expires_at)
    if wanted == key_grants.rules_of(known) and changes["expires_at"] == known.expires_at:
        outcome.add(path, name, Result.UNCHANGED)
        return
    key_services.api_key_update(public_id=known.public_id, changes=changes)
    outcome.add(path, name, Result.CHANGED)


def _key_rules(entry: _Document, known: ApiKey | None) -> KeyRules:
    """Return the rules that the key gets: those left out are the known key's, else the defaults.

    Raises InvalidRequest.
    """
    before = key_grants.rules_of(known) if known else KeyRules(scopes=DEFAULT_SCOPES)
    if "role" in entry:
        scopes = tuple(PERMISSIONS[Role(entry["role"])])
    else:
        scopes = tuple(entry.get("scopes", before.scopes))
    if beyond := sorted(set(scopes) - DEVELOPER - set(before.scopes)):
        raise InvalidRequest(
            f"A key without owner can have a developer's scopes at most, not {beyond[0]}. Make it "
            "for a service account with that role.",
            param="scopes",
        )
    return KeyRules(
        scopes=scopes,
        allowed_models=tuple(entry.get("allowed_models", before.allowed_models)),
        allowed_ips=tuple(entry.get("allowed_ips", before.allowed_ips)),
    ).checked()


def _numbers(
    part: str,
    names: tuple[str, ...],
    known: RateLimit | TenantQuota | None,
    document: _Document,
    write: Callable[..., Any],
    outcome: Provisioned,
) -> None:
    """Set limits or quotas. Those left out stay."""
    before = {name: getattr(known, name, None) for name in names}
    wanted = {**before, **document[part]}
    result = Result.UNCHANGED
    if wanted != before:
        write(**wanted)
        result = Result.CREATED if known is None else Result.CHANGED
    outcome.add(part, part, result)


def _adapter(path: str, entry: _Document, outcome: Provisioned) -> None:
    name, base_model = entry["name"], entry.get("base_model")
    known = Adapter.objects.filter(name=name).select_related("base_model").first()
    if known is None:
        adapter_create(name=name, base_model_name=base_model)
        outcome.add(path, name, Result.CREATED)
        return
    if base_model not in (None, known.base_model.name):
        raise Conflict(
            f"{name} is an adapter of {known.base_model.name}; choose another name.",
            param="base_model",
        )
    outcome.add(path, name, Result.UNCHANGED)


def _schedule(path: str, entry: _Document, outcome: Provisioned) -> None:
    name = entry["adapter"]
    adapter = Adapter.objects.filter(name=name).first()
    adapter = require(adapter, "There is no such adapter.", param="adapter")
    known = Schedule.objects.filter(adapter=adapter).first()
    before = settings_changed(known, {}) if known else None
    changed = {field: value for field, value in entry.items() if field != "adapter"}
    wanted = settings_changed(known, changed)
    wanted["hyperparameters"] = checked_hyperparameters(wanted["hyperparameters"])
    if wanted == before:
        outcome.add(path, name, Result.UNCHANGED)
        return
    schedule_set(adapter=adapter, **wanted)
    outcome.add(path, name, Result.CHANGED if known else Result.CREATED)
