"""GET /api/v1/usage: a tenant's own totals."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from rest_framework.test import APIClient

from controlplane.usage.services import usage_settle
from tests.controlplane.conftest import Party, as_key
from tests.controlplane.queue.test_accountant import record


def moment(day: str, hour: int = 12) -> float:
    return dt.datetime.fromisoformat(f"{day}T{hour:02}:00:00+00:00").timestamp()


@pytest.fixture
def used(acme: Party, globex: Party) -> None:
    usage_settle(
        [
            record(acme, "req_1", created_at=moment("2026-03-01", 0)),
            record(acme, "req_2", created_at=moment("2026-03-01", 23), prompt_tokens=100),
            record(acme, "req_3", created_at=moment("2026-03-01"), model="voice"),
            record(acme, "req_4", created_at=moment("2026-03-02")),
            record(globex, "req_5", created_at=moment("2026-03-01")),
        ]
    )


def get(client: APIClient, **query: str) -> Any:
    return client.get("/api/v1/usage", query).json()


@pytest.mark.usefixtures("used")
def test_totals_per_day_and_model(acme: Party) -> None:
    data = get(as_key(acme), start="2026-03-01", end="2026-03-02")["data"]
    assert [(row["date"], row["model"], row["requests"]) for row in data] == [
        ("2026-03-02", "invoices", 1),
        ("2026-03-01", "invoices", 2),
        ("2026-03-01", "voice", 1),
    ]
    assert (data[1]["prompt_tokens"], data[1]["completion_tokens"]) == (111, 14)


@pytest.mark.usefixtures("used")
def test_another_tenant_sees_only_its_own(globex: Party) -> None:
    data = get(as_key(globex), start="2026-03-01", end="2026-03-31")["data"]
    assert [row["requests"] for row in data] == [1]


@pytest.mark.usefixtures("used")
def test_days_outside_are_left_out(acme: Party) -> None:
    data = get(as_key(acme), start="2026-03-02", end="2026-03-02")["data"]
    assert [row["date"] for row in data] == ["2026-03-02"]
    assert get(as_key(acme), end="2026-02-28")["data"] == []


@pytest.mark.parametrize(
    "query,param",
    [
        ({"start": "yesterday"}, "start"),
        ({"end": "2026-13-01"}, "end"),
        ({"end": "0001-01-01"}, "end"),
        ({"start": "2026-03-02", "end": "2026-03-01"}, "start"),
        ({"start": "2020-01-01", "end": "2026-03-01"}, "start"),
    ],
    ids=str,
)
def test_bad_days_are_named(acme: Party, query: dict[str, str], param: str) -> None:
    error = get(as_key(acme), **query)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_nobody_in_particular_sees_nothing(db: None) -> None:
    assert APIClient().get("/api/v1/usage").status_code == 401
