"""The copied parties of the tests are what the services make."""

from __future__ import annotations

from typing import Any

import pytest
from allauth.account.models import EmailAddress
from django.apps import apps
from django.db.models import Model

from controlplane.events.audit.models import AuditEvent
from controlplane.events.audit.services import verify
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants.models import ApiKey, Membership
from tests.controlplane.conftest import as_key, as_user
from tests.controlplane.parties import PASSWORD, Party, make_party, served_party

#: What differs between any two parties, though one kind made both.
OWN = {"id", "password", "date_joined", "occurred_at", "created_at", "hash", "prev_hash"}
OWN_OF_KEYS = {"public_id", "secret_hmac", "last4"}


def all_rows() -> dict[type[Model], list[dict[str, Any]]]:
    with all_tenants(reason="what a party consists of"):
        return {
            model: list(model._base_manager.order_by("pk").values())
            for model in apps.get_models()
            if model._meta.managed and not model._meta.proxy
        }


def added(slug: str, make: Any) -> tuple[Party, dict[str, list[dict[str, Any]]]]:
    """Make a party: itself, and the rows that are new, without what is each party's own."""
    before = all_rows()
    party: Party = make(slug)
    names = {str(party.tenant.pk): "tenant", party.api_key.public_id: "key"}
    names |= {str(party.owner.pk): "owner", str(party.viewer.pk): "viewer", slug: "slug"}
    names |= {slug.title(): "Slug", str(party.api_key.pk): "key's row"}
    new: dict[str, list[dict[str, Any]]] = {}
    for model, rows in sorted(all_rows().items(), key=lambda each: each[0] is AuditEvent):
        own = OWN | (OWN_OF_KEYS if model is ApiKey else set())
        fresh = [row for row in rows if row not in before[model]]
        names |= {str(row["id"]): model.__name__ for row in fresh if model is Membership}
        told = [
            {name: renamed(value, names) for name, value in row.items() if name not in own}
            for row in fresh
        ]
        if told:
            new[model._meta.label] = told
    return party, new


def renamed(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    if isinstance(value, bool | int | bytes | memoryview) or value is None:
        return value
    text = str(value)
    for old, new in names.items():
        text = text.replace(old, new)
    return text


@pytest.mark.django_db
def test_a_copied_party_has_the_rows_of_one_that_the_services_made() -> None:
    served, expected = added("acme", served_party)
    copied, found = added("globex", make_party)
    assert found == expected and len(found) == 6
    assert len(found["audit.AuditEvent"]) == 6
    for party in (served, copied):
        assert verify(party.tenant.pk)[1] == []
        assert party.owner.check_password(PASSWORD)
        assert party.api_key.last4 == party.key_text[-4:]
        assert EmailAddress.objects.get(user=party.viewer).email == party.viewer.email
        assert as_key(party).get("/api/v1/adapters").status_code == 200
        assert as_user(party.owner).get("/api/v1/keys").status_code == 200
        assert as_user(party.viewer).post("/api/v1/keys", {"name": "a"}).status_code == 403
