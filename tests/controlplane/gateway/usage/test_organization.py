"""Usage in buckets, as OpenAI's clients ask for it, and of one request."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.http import QueryDict
from rest_framework.test import APIClient

from controlplane.errors import InvalidRequest
from controlplane.gateway.usage.organization import page, parse
from controlplane.tenancy.scoping import tenant_scope
from controlplane.usage.models import UsageRecord
from controlplane.usage.services import usage_records_create
from tests.controlplane.conftest import Party

NOW = dt.datetime(2026, 3, 10, 12, 30, tzinfo=dt.UTC)


def used(party: Party, request_id: str, at: dt.datetime, *, model: str = "m") -> None:
    with tenant_scope(party.tenant.id):
        usage_records_create(
            [
                UsageRecord(
                    request_id=request_id,
                    api_key_id=party.api_key.id,
                    model=model,
                    base_model="b",
                    prompt_tokens=10,
                    cached_tokens=4,
                    completion_tokens=5,
                    finish_reason="stop",
                    occurred_at=at,
                )
            ]
        )


def asked(party: Party, text: str) -> dict[str, Any]:
    with tenant_scope(party.tenant.id):
        return page(parse(QueryDict(text), now=NOW))


def test_buckets_by_hour_and_model(acme: Party, globex: Party) -> None:
    used(acme, "r1", NOW)
    used(acme, "r2", NOW, model="n")
    used(acme, "r3", NOW - dt.timedelta(hours=1))
    used(globex, "r4", NOW)
    start = int((NOW - dt.timedelta(hours=2)).timestamp())
    answer = asked(acme, f"start_time={start}&bucket_width=1h&group_by[]=model")
    assert answer["object"] == "page"
    counts = [
        [(result["model"], result["num_model_requests"]) for result in bucket["results"]]
        for bucket in answer["data"]
    ]
    assert counts[:3] == [[], [("m", 1)], [("m", 1), ("n", 1)]]
    assert answer["data"][1]["results"][0]["input_tokens"] == 10
    assert not answer["has_more"]


def test_pages_cover_the_time_without_gap_or_repetition(acme: Party) -> None:
    start = NOW - dt.timedelta(days=9)
    for day in range(10):
        used(acme, f"r{day}", start + dt.timedelta(days=day))
    text, starts, requests = f"start_time={int(start.timestamp())}&limit=4", [], 0
    following: str | None = ""
    while following is not None:
        answer = asked(acme, f"{text}&page={following}" if following else text)
        starts += [bucket["start_time"] for bucket in answer["data"]]
        requests += sum(
            result["num_model_requests"] for b in answer["data"] for result in b["results"]
        )
        following = answer["next_page"]
    assert starts == sorted(set(starts))
    assert requests == 10


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("", "start_time"),
        ("start_time=x", "start_time"),
        ("start_time=5&end_time=5", "end_time"),
        ("start_time=5&limit=0", "limit"),
        ("start_time=5&limit=32", "limit"),
        ("start_time=5&bucket_width=1y", "bucket_width"),
        ("start_time=5&group_by[]=tenant", "group_by"),
        ("start_time=99999999999999", "start_time"),
    ],
)
def test_what_cannot_be_is_named(text: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(QueryDict(text), now=NOW)
    assert caught.value.param == param


def test_usage_of_one_request_is_for_its_tenant_alone(acme: Party, globex: Party) -> None:
    used(acme, "req_1", NOW)

    def get(party: Party, request_id: str) -> Any:
        headers = {"Authorization": party.header}
        return APIClient().get(f"/api/v1/requests/{request_id}/usage", headers=headers)

    assert get(acme, "req_1").json()["completion_tokens"] == 5
    assert get(globex, "req_1").status_code == 404
    assert get(globex, "req_1").content == get(globex, "req_2").content
