"""The usage page."""

from __future__ import annotations

import datetime as dt
import uuid

import pytest
from django.utils import timezone

from controlplane.console.usage import MAX_SERIES, usage_report
from controlplane.tenancy.scoping import tenant_scope
from controlplane.usage.models import UsageDay, UsageHour
from tests.controlplane.conftest import Party
from tests.controlplane.console.conftest import browser_of

NOW = dt.datetime(2026, 11, 21, 14, 30, tzinfo=dt.UTC)


def hour(hours_ago: int, model: str, tokens: int, key: uuid.UUID | None = None) -> None:
    starts_at = NOW.replace(minute=0) - dt.timedelta(hours=hours_ago)
    UsageHour.objects.create(
        starts_at=starts_at,
        model=model,
        api_key_id=key,
        requests=1,
        prompt_tokens=tokens,
        cached_tokens=0,
        completion_tokens=1,
    )


def test_sums_by_model_and_by_key(acme: Party, globex: Party) -> None:
    with tenant_scope(globex.tenant.id):
        hour(0, "theirs", 1000)
    with tenant_scope(acme.tenant.id):
        hour(0, "small", 10, acme.api_key.pk)
        hour(23, "large", 99, acme.api_key.pk)
        hour(0, "large", 100, uuid.uuid4())
        hour(24, "large", 10_000)  # a day and an hour ago
        report = usage_report(span="day", by="model", measure="tokens", now=NOW)
        assert [(row.label, row.requests, row.prompt_tokens) for row in report.rows] == [
            ("large", 2, 199),
            ("small", 1, 10),
        ]
        assert report.totals["completion_tokens"] == 3
        assert report.chart.top == 112  # of the last hour, both models
        assert len(report.chart.bars) == 24
        assert [series for series, _ in report.chart.bars[-1].parts] == [0, 1]
        by_key = usage_report(span="day", by="key", measure="requests", now=NOW)
        assert [(row.label, row.requests) for row in by_key.rows] == [
            (f"tests (…{acme.api_key.last4})", 2),
            ("a deleted key", 1),
        ]


def test_many_models_share_the_last_colour(acme: Party) -> None:
    with tenant_scope(acme.tenant.id):
        for number in range(8):
            hour(0, f"model-{number}", 100 - number)
        report = usage_report(span="week", by="model", measure="tokens", now=NOW)
    assert [row.series for row in report.rows] == [0, 1, 2, 3, 4, 4, 4, 4]
    assert len(report.chart.bars[-1].parts) == MAX_SERIES
    lowest = report.chart.bars[-1].parts[-1][1]
    assert lowest.y == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("span", ["day", "week", "month", "quarter", "aeon"])
@pytest.mark.parametrize("by", ["model", "key"])
def test_page(span: str, by: str, acme: Party) -> None:
    now = timezone.now()
    with tenant_scope(acme.tenant.id):
        for table in (UsageHour, UsageDay):
            table.objects.create(
                starts_at=now.replace(minute=0, second=0, microsecond=0)
                if table is UsageHour
                else now.replace(hour=0, minute=0, second=0, microsecond=0),
                model="invoices",
                api_key_id=acme.api_key.pk,
                requests=3,
                prompt_tokens=1234,
                cached_tokens=0,
                completion_tokens=1,
            )
    page = browser_of(acme.viewer).get(f"/console/usage?span={span}&by={by}").content.decode()
    assert "1,234" in page
    assert ("invoices" in page) == (by == "model")
