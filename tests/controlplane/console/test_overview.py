"""The first page's numbers."""

from __future__ import annotations

import datetime as dt

from django.utils import timezone

from controlplane.console import overview
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Role
from controlplane.tenants.services import member_add
from controlplane.usage.models import UsageRecord
from controlplane.usage.services import usage_records_create
from tests.controlplane.conftest import PASSWORD, Party
from tests.controlplane.console.conftest import Belongings, browser_of


def record(request_id: str, hours_ago: float, *, reason: str = "stop") -> None:
    at = timezone.now() - dt.timedelta(hours=hours_ago)
    InferenceRequest.objects.create(
        request_id=request_id,
        model="invoices",
        base_model="tiny",
        finish_reason=reason,
        accepted_at=at,
        first_token_ms=None if reason == "error" else 100 * (1 + hours_ago),
    )
    usage_records_create(
        [
            UsageRecord(
                request_id=request_id,
                model="invoices",
                base_model="tiny",
                prompt_tokens=10,
                completion_tokens=5,
                finish_reason=reason,
                occurred_at=at,
            )
        ]
    )


def test_counts_the_last_day_of_the_tenant_alone(acme: Party, globex: Party) -> None:
    with tenant_scope(globex.tenant.id):
        record("theirs", 1)
    with tenant_scope(acme.tenant.id):
        record("now", 0)
        record("earlier", 2)
        record("failed", 3, reason="error")
        record("long ago", 30)
        day = overview.last_day(timezone.now())
    assert (day.num_requests, day.num_errors) == (3, 1)
    assert (day.prompt_tokens, day.completion_tokens) == (30, 15)
    assert day.first_token_ms == 300
    assert len(day.chart.bars) == 24
    assert sum(bar.height > 0 for bar in day.chart.bars) == 3


def test_page_of_a_new_tenant_says_what_to_do(acme: Party) -> None:
    page = browser_of(acme.owner).get("/console/").content.decode()
    assert "No adapter yet" in page
    assert 'href="/console/upload"' in page
    assert "No request yet" in page


def test_example_call_names_the_live_adapter(acme: Party, belongings: Belongings) -> None:
    page = browser_of(acme.viewer).get("/console/").content.decode()
    assert "{&quot;model&quot;: &quot;invoices&quot;" in page or '{"model": "invoices"' in page
    assert "/v1/chat/completions" in page


def test_requests_are_for_those_who_may_read_the_log(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        record("failed", 1, reason="error")
        payer = member_add(email="pay@acme.test", role=Role.BILLING, password=PASSWORD).user
    for user, is_shown in ((acme.viewer, True), (payer, False)):
        page = browser_of(user).get("/console/").content.decode()
        assert ("Recent requests" in page) == is_shown
        assert ('<span class="badge bad">failed</span>' in page) == is_shown
