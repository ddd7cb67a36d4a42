"""Limits and budgets in the console, with what Redis says is taken."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
import redis
from django.conf import settings

from contract.queue import fair_queue
from controlplane.console import limit_meters
from controlplane.tenancy.scoping import tenant_scope
from controlplane.usage.limits.admit import budget_state_key
from controlplane.usage.limits.models import Budget, RateLimit
from controlplane.usage.limits.services import budget_set, rate_limit_set
from tests.controlplane.conftest import Party
from tests.controlplane.console.conftest import browser_of


@pytest.fixture
def client() -> Iterator[redis.Redis]:
    with redis.Redis.from_url(settings.REDIS_URL) as opened:
        yield opened


def test_what_is_taken_is_shown(acme: Party, client: redis.Redis) -> None:
    with tenant_scope(acme.tenant.id):
        row = rate_limit_set(
            model="invoices", requests_per_minute=60, tokens_per_minute=600, max_concurrent=4
        )
        key = fair_queue.limit_key(settings.POOL, str(acme.tenant.id), row.id.hex)
        now = time.time()
        client.hset(key, mapping={"r": f"{now + 15:.6f}", "t": f"{now - 5:.6f}"})
        client.zadd(f"{key}:run", {"one": now + 60, "two": now + 60, "over": now - 1})
        taken = {meter.label: meter.used for meter in limit_meters.meters([row])[row.pk]}
        assert taken == {"requests a minute": 15, "tokens a minute": 0, "at a time": 2}
        budget = budget_set(period="day", hard_limit=1000)
        period = limit_meters.budget_states([budget])[budget.pk].period
        state_key = budget_state_key(settings.POOL, str(acme.tenant.id), period)
        client.hset(state_key, mapping={"spent": 250, "reserved": 30})
        state = limit_meters.budget_states([budget])[budget.pk]
        assert (state.spent, state.reserved) == (250, 30)
    page = browser_of(acme.viewer).get("/console/limits/now").content.decode()
    assert "2 of 4 at a time" in page
    assert "250 of 1,000" in page
    client.delete(key, f"{key}:run", state_key)


@pytest.mark.parametrize(
    ("spent", "tones", "over"),
    [
        (0, ["good", "good"], []),
        (79, ["good", "good"], []),
        (80, ["warn", "good"], []),
        (90, ["warn", "warn"], ["10"]),
        (100, ["warn", "bad"], ["20"]),
        (375, ["warn", "bad"], ["295", "275"]),
    ],
)
def test_a_spent_budget_is_drawn_and_said_as_one(
    spent: int, tones: list[str], over: list[str], acme: Party, client: redis.Redis
) -> None:
    with tenant_scope(acme.tenant.id):
        budget = budget_set(period="day", soft_limit=80, hard_limit=100)
        period = limit_meters.budget_states([budget])[budget.pk].period
    state_key = budget_state_key(settings.POOL, str(acme.tenant.id), period)
    client.hset(state_key, mapping={"spent": spent, "reserved": 0})
    page = browser_of(acme.viewer).get("/console/limits/now").content.decode()
    client.delete(state_key)
    assert re.findall(r'<meter class="(\w+)"', page) == tones
    assert re.findall(r"· (\S+) over", page) == over


def test_without_redis_the_page_is_there(acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    with tenant_scope(acme.tenant.id):
        rate_limit_set(model="invoices", requests_per_minute=60)
        budget_set(period="day", hard_limit=1000)
    monkeypatch.setattr(limit_meters, "_ask", lambda groups: None)
    page = browser_of(acme.viewer).get("/console/limits").content.decode()
    assert "? of 60 requests a minute" in page
    assert "0 of 1,000" in page


def test_limits_are_set_replaced_and_removed(acme: Party) -> None:
    browser = browser_of(acme.owner)
    form = {"model": "invoices", "requests_per_minute": "5"}
    assert browser.post("/console/limits/set", form).status_code == 302
    assert browser.post("/console/limits/set", form | {"max_waiting": "7"}).status_code == 302
    with tenant_scope(acme.tenant.id):
        row = RateLimit.objects.get()
    assert (row.requests_per_minute, row.max_waiting) == (5, 7)
    browser.post(f"/console/limits/{row.pk}/remove")
    key = {"api_key": str(acme.api_key.pk)}
    budget = key | {"period": "day", "soft_limit": "10", "hard_limit": "20"}
    assert browser.post("/console/budgets/set", budget).status_code == 302
    with tenant_scope(acme.tenant.id):
        assert not RateLimit.objects.exists()
        assert Budget.objects.get().api_key == acme.api_key
        browser.post(f"/console/budgets/{Budget.objects.get().pk}/remove")
        assert not Budget.objects.exists()


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("limits", {"model": "invoices"}),
        ("limits", {"requests_per_minute": "5"}),
        ("limits", {"model": "invoices", "requests_per_minute": "0"}),
        ("limits", {"model": "invoices", "requests_per_minute": "9" * 20}),
        ("budgets", {"period": "day"}),
        ("budgets", {"period": "day", "soft_limit": "20", "hard_limit": "10"}),
        ("budgets", {"period": "century", "hard_limit": "10"}),
    ],
)
def test_what_is_no_limit_is_said_so(path: str, form: dict[str, str], acme: Party) -> None:
    answer = browser_of(acme.owner).post(f"/console/{path}/set", form)
    assert answer.status_code == 422
    with tenant_scope(acme.tenant.id):
        assert not RateLimit.objects.exists()
        assert not Budget.objects.exists()


def test_the_tenants_own_limit_is_the_operators(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.id):
        row = rate_limit_set(requests_per_minute=5)
        budget = budget_set(hard_limit=5)
    assert browser_of(acme.owner).post(f"/console/limits/{row.pk}/remove").status_code == 403
    stranger = browser_of(globex.owner)
    assert stranger.post(f"/console/limits/{row.pk}/remove").status_code == 404
    assert stranger.post(f"/console/budgets/{budget.pk}/remove").status_code == 404
    key = {"api_key": str(acme.api_key.pk), "requests_per_minute": "1"}
    assert stranger.post("/console/limits/set", key).status_code == 422
    with tenant_scope(acme.tenant.id):
        assert RateLimit.objects.count() == Budget.objects.count() == 1
