"""Tenants with people and a key, for tests: made once by the services, then copied row by row.

Nearly every test of the control plane begins with one. The services need 80 statements for it, and
the copies, which `test_parties.py` compares with what the services make, need six.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from allauth.account.models import EmailAddress
from django.conf import settings
from django.db import models, transaction
from django.utils import timezone

from controlplane.events.audit.models import AuditEvent
from controlplane.infra.ciphers import pepper_id
from controlplane.tenancy.scoping import new_id, tenant_scope
from controlplane.tenants import keys, services
from controlplane.tenants.models import ApiKey, Membership, Role, Tenant, User

PASSWORD = "a long enough passphrase"

#: What the copied tenant is called; a copy has its own name in the place of it.
_SLUG = "zz-copied-tenant"


@dataclasses.dataclass(frozen=True)
class Party:
    """A tenant with a person of each kind the tests need, and a key."""

    tenant: Tenant
    owner: User
    viewer: User
    api_key: ApiKey
    key_text: str

    @property
    def header(self) -> str:
        return f"Bearer {self.key_text}"


def make_party(slug: str) -> Party:
    """Make a party as `served_party` does, with the same rows but for ids and times."""
    global _copied
    if _copied is None:
        _copied = _rows_of_a_party()
    return _copy(_copied, slug)


def served_party(slug: str) -> Party:
    """Make a party by the services that the product has."""
    tenant = services.tenant_create(slug=slug, name=slug.title())
    with tenant_scope(tenant.id):
        owner = services.member_add(
            email=f"owner@{slug}.example", role=Role.OWNER, password=PASSWORD
        )
        viewer = services.member_add(
            email=f"viewer@{slug}.example", role=Role.VIEWER, password=PASSWORD
        )
        api_key, key_text = services.api_key_create(name="tests")
    return Party(tenant, owner.user, viewer.user, api_key, key_text)


#: Each model's rows, the referenced ones first.
_Rows = list[list[models.Model]]
_copied: _Rows | None = None


def _rows_of_a_party() -> _Rows:
    with transaction.atomic():
        party = served_party(_SLUG)
        with tenant_scope(party.tenant.id):
            people = [party.owner, party.viewer]
            rows: _Rows = [
                [party.tenant],
                list(User.objects.filter(pk__in=[user.pk for user in people]).order_by("pk")),
                list(EmailAddress.objects.filter(user__in=people).order_by("pk")),
                list(Membership.objects.order_by("pk")),
                list(ApiKey.objects.all()),
                list(AuditEvent.objects.order_by("seq")),
            ]
        transaction.set_rollback(True)
    return rows


def _copy(rows: _Rows, slug: str) -> Party:
    [old_tenant], _, _, _, [old_key], _ = rows
    assert isinstance(old_key, ApiKey)
    parts = keys.generate()
    names = {_SLUG: slug, _SLUG.title(): slug.title(), old_key.public_id: parts.public_id}
    new_ids: dict[Any, Any] = {
        row.pk: new_id() for group in rows for row in group if not isinstance(row, EmailAddress)
    }
    # Python's dictionaries keep their order, and no id is part of another.
    names |= {str(old): str(new) for old, new in new_ids.items()}
    later = timezone.now() - old_key.created_at

    def copied(value: Any) -> Any:
        if isinstance(value, str):
            for old, new in names.items():
                value = value.replace(old, new)
        elif isinstance(value, dict):
            value = json.loads(copied(json.dumps(value)))
        elif hasattr(value, "utcoffset"):
            value += later
        return new_ids.get(value, value) if value.__hash__ else value

    made: _Rows = []
    with tenant_scope(new_ids[old_tenant.pk]):
        for group in rows:
            model: Any = type(group[0])
            new = [
                model(**{
                    field.attname: copied(getattr(row, field.attname))
                    for field in model._meta.concrete_fields
                    if not (model is EmailAddress and field.primary_key)
                })
                for row in group
            ]  # fmt: skip
            _finish(new, parts)
            made.append(model._base_manager.bulk_create(new))
    [tenant], people, _, _, [api_key], _ = made
    owner, viewer = sorted(people, key=lambda person: str(person))
    return Party(tenant, owner, viewer, api_key, parts.text())  # type: ignore[arg-type]


def _finish(rows: Sequence[Any], parts: keys.KeyParts) -> None:
    """Compute what follows from the rest: the key's HMAC, and the audit trail's hashes."""
    last = ""
    for row in rows:
        if isinstance(row, ApiKey):
            row.secret_hmac = parts.secret_hmac(settings.API_KEY_PEPPER)
            row.pepper_id = pepper_id(settings.API_KEY_PEPPER)
            row.last4 = parts.text()[-4:]
        if isinstance(row, AuditEvent):
            row.prev_hash = last
            row.hash = last = row.digest()
