"""What all of /api shares: permissions, the scope, addresses, the document that describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory

from controlplane.management.base import TenantAPIView
from controlplane.tenancy.scoping import TenantScopeError, current_tenant_id
from tests.controlplane.conftest import Party, as_key, as_user, assert_error


class EchoView(TenantAPIView):
    """Says whose scope it runs in; nobody was given leave to PUT."""

    def get(self, request: Request) -> Response:
        return Response({"tenant": str(current_tenant_id())})

    def put(self, request: Request) -> Response:
        raise AssertionError("not to be reached")


def ask(party: Party, method: str) -> Any:
    request = APIRequestFactory().generic(method, "/", HTTP_AUTHORIZATION=party.header)
    return EchoView.as_view()(request)


def test_view_runs_in_the_callers_scope(acme: Party, globex: Party) -> None:
    for party in (acme, globex):
        assert ask(party, "GET").data == {"tenant": str(party.tenant.id)}


def test_write_that_names_no_permission_is_refused(acme: Party) -> None:
    assert ask(acme, "PUT").status_code == 403


def test_scope_ends_with_the_answer(acme: Party) -> None:
    for url in ("/api/v1/keys", "/api/v1/adapters/missing", "/api/v1/keys?limit=x"):
        as_key(acme).get(url)
        with pytest.raises(TenantScopeError):
            current_tenant_id()


def test_unknown_address_under_api_is_json(db: None) -> None:
    assert_error(Client().get("/api/v1/nowhere"), 404)


def test_openapi_document_is_sound(db: None, tmp_path: Path) -> None:
    """Fails on every warning, so that no view goes undescribed."""
    target = tmp_path / "openapi.json"
    call_command("spectacular", file=str(target), validate=True, fail_on_warn=True)
    assert "bearer" in target.read_text()


def test_openapi_and_docs_are_served_to_all(db: None) -> None:
    document = Client().get("/api/openapi.json").json()
    assert document["paths"]["/api/v1/adapters/{name}/versions"]["post"]
    page = Client().get("/api/docs").content.decode()
    assert "/static/drf_spectacular_sidecar/" in page
    assert "https://" not in page


@pytest.mark.parametrize("limit", ["0", "101", "0001000", "00010000000", "-1", "٣", ""])
def test_page_is_never_longer_than_the_most(limit: str, acme: Party) -> None:
    assert_error(as_key(acme).get("/api/v1/keys", {"limit": limit}), 400, "limit")


@pytest.mark.parametrize(
    "body", ['{"\\ud800": 1}', '{"email": "a@acme.example", "role": "\\ud800"}']
)
def test_half_a_surrogate_pair_is_answered(body: str, acme: Party) -> None:
    """It is valid JSON, and no answer can repeat it."""
    answer = as_user(acme.owner).post("/api/v1/invites", body, content_type="application/json")
    assert answer.status_code == 400
    assert "?" in answer.content.decode()


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "hard_limit", "Set a hard limit or a soft limit: a budget needs one."),
        (
            {"hard_limit": 0, "soft_limit": 1},
            "soft_limit",
            "The soft limit is above the hard one: lower it.",
        ),
        ({"period": "x"}, "period", '"x" is not one of: day, month.'),
    ],
)
def test_errors_name_what_is_allowed(
    body: dict[str, Any], param: str, message: str, acme: Party
) -> None:
    answer = as_user(acme.owner).put("/api/v1/budgets", body, format="json")
    assert assert_error(answer, 400, param)["message"] == message
