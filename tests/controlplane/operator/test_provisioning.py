"""PUT /ops/v1/tenants/{slug}: one document, all or nothing, and nothing twice."""

from __future__ import annotations

from typing import Any

from django.core import mail
from rest_framework.test import APIClient

from controlplane.adapters.models import BaseModel
from controlplane.service_keys.scopes import Scope
from controlplane.service_keys.services import service_key_create
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants import auth

URL = "/ops/v1/tenants/initech"
DOCUMENT: dict[str, Any] = {
    "name": "Initech",
    "status": "active",
    "owner": {"email": "Peter@initech.example"},
    "keys": [
        {"name": "app", "role": "developer", "allowed_ips": ["192.0.2.7"]},
        {"name": "board", "scopes": ["read", "usage:read"], "expires_at": "2099-01-01T00:00:00Z"},
    ],
    "limits": {"requests_per_minute": 60},
    "quota": {"training_runs": 3},
    "adapters": [{"name": "invoices", "base_model": "tiny"}, {"name": "letters"}],
}


def as_service_key(*scopes: str, **fields: Any) -> APIClient:
    """A client of /ops/v1 with a new service key."""
    with all_tenants(reason="test"):
        service_key, text = service_key_create(name="script", scopes=scopes or Scope, **fields)
    client = APIClient(enforce_csrf_checks=True)
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    client.service_key = service_key
    return client


def put(client: APIClient, document: Any, query: str = "", **more: Any) -> Any:
    return client.put(URL + query, document, format="json", **more)


def results(answer: Any) -> dict[str, str]:
    return {part["path"]: part["result"] for part in answer.json()["parts"]}


def test_a_document_makes_a_tenant_once(
    base_model: BaseModel, django_capture_on_commit_callbacks: Any
) -> None:
    client = as_service_key()
    with django_capture_on_commit_callbacks(execute=True):
        made = put(client, DOCUMENT)
    assert made.status_code == 201, made.content
    assert set(results(made).values()) == {"created"}
    assert set(results(made)) == {
        *("tenant", "owner", "keys[0]", "keys[1]"),
        *("limits", "quota", "adapters[0]", "adapters[1]"),
    }
    (letter,) = mail.outbox
    owner, app, board = made.json()["secrets"]
    assert letter.to == ["peter@initech.example"]
    assert owner["url"] in letter.body
    assert auth.authenticate(f"Bearer {app['key']}", "192.0.2.7").tenant.slug == "initech"
    assert auth.authenticate(f"Bearer {board['key']}").permissions == {"read", "usage:read"}
    again = put(client, DOCUMENT)
    assert again.status_code == 200
    assert set(results(again).values()) == {"unchanged"}
    assert again.json()["secrets"] == []
    assert len(mail.outbox) == 1
