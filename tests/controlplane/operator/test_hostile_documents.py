"""PUT /ops/v1/tenants/{slug} with bodies that nobody should send: an error, never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controlplane.adapters.models import BaseModel
from controlplane.tenants.models import Tenant
from tests.controlplane.operator.service_keys import as_service_key

pytestmark = pytest.mark.django_db
NASTY: list[Any] = [
    *(None, 0, -1, 2**70, 1e308, True, "", " ", "a\0b", "\ud800", "x" * 5000, "../x", "ä"),
    *([], [[]], {}, {"a": {}}, [None], [0], [{"name": None}], [{"name": {}}]),
]
FIELDS = (
    *("name", "status", "owner", "keys", "limits", "quota", "adapters", "schedules"),
    *("owner.email", "limits.max_waiting", "quota.storage_bytes"),
    *("keys.name", "keys.role", "keys.scopes", "keys.allowed_models", "keys.allowed_ips"),
    *("keys.expires_at", "keys.environment", "adapters.name", "adapters.base_model"),
    *("schedules.adapter", "schedules.dataset", "schedules.cron", "schedules.timezone"),
    *("schedules.hyperparameters", "schedules.is_paused"),
)
WHOLE: dict[str, Any] = {
    "owner": {"email": "peter@initech.example"},
    "limits": {},
    "quota": {},
    "keys": {"name": "app"},
    "adapters": {"name": "invoices"},
    "schedules": {"adapter": "invoices", "dataset": "rows", "cron": "0 3 * * *"},
}


def document(field: str, value: Any) -> dict[str, Any]:
    part, _, inner = field.partition(".")
    if not inner:
        return {"name": "Initech", part: value}
    entry = {**WHOLE[part], inner: value}
    one = part in ("owner", "limits", "quota")
    made = {"name": "Initech", part: entry if one else [entry]}
    return made if part != "schedules" else {**made, "adapters": [{"name": "invoices"}]}


@pytest.mark.parametrize("field", FIELDS)
def test_no_value_of_a_field_breaks_it(base_model: BaseModel, field: str) -> None:
    client = as_service_key()
    client.raise_request_exception = False
    for number, value in enumerate(NASTY):
        url = f"/ops/v1/tenants/t{number}"
        answer = client.put(
            url, json.dumps(document(field, value)), content_type="application/json"
        )
        assert answer.status_code in (200, 201, 400, 409), (field, value, answer.content)
        if answer.status_code >= 400:
            error = answer.json()["error"]
            assert error["param"], (field, value, error)
            assert not Tenant.objects.filter(slug=f"t{number}").exists()
