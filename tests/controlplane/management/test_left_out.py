"""A PUT changes what its body names: what is left out stays, and null or empty removes it."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest

from controlplane.adapters.models import Adapter, BaseModel
from controlplane.evaluations.models import Judge
from controlplane.infra.outbound.outbound_policy import OutboundPolicy
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import DatasetSource
from tests.controlplane.conftest import Party, as_key, as_user, assert_error, make_operator
from tests.controlplane.training.conftest import ROWS


@pytest.fixture
def ready(acme: Party, base_model: BaseModel, settings: Any) -> Party:
    settings.OUTBOUND = OutboundPolicy(
        hosts=frozenset({"127.0.0.1"}), allowed=(ipaddress.ip_network("127.0.0.0/8"),)
    )
    settings.HUB_ENDPOINT = "http://127.0.0.1:1"
    with tenant_scope(acme.tenant.id):
        dataset_services.dataset_upload(name="chats", content=ROWS)
        dataset_services.dataset_upload(name="tests", content=ROWS)
        Adapter.objects.create(name="greeter", base_model=base_model)
    return acme


def put(client: Any, url: str, /, **body: Any) -> dict[str, Any]:
    answer = client.put(url, body, format="json")
    assert answer.status_code == 200, answer.content
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.parametrize("whose", ["a model's", "the tenant's"])
def test_limits(ready: Party, whose: str) -> None:
    client: Any = as_user(ready.owner)
    url, names = "/api/v1/limits", {"model": "greeter"}
    if whose == "the tenant's":
        client, url, names = (
            as_user(make_operator("ops@lorikeet.example")),
            "/ops/v1/tenants/acme/limits",
            {},
        )
    put(client, url, **names, requests_per_minute=60, tokens_per_minute=1000, max_waiting=5)
    told = put(client, url, **names, requests_per_minute=30, max_waiting=None)
    rates = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "max_waiting")
    assert [told[name] for name in rates] == [30, 1000, None, None]


def test_budgets(ready: Party) -> None:
    client = as_user(ready.owner)
    put(client, "/api/v1/budgets", period="day", hard_limit=100, soft_limit=50)
    told = put(client, "/api/v1/budgets", period="day", hard_limit=200)
    assert (told["hard_limit"], told["soft_limit"]) == (200, 50)
    told = put(client, "/api/v1/budgets", period="day", hard_limit=None)
    assert (told["hard_limit"], told["soft_limit"]) == (None, 50)
    answer = client.put("/api/v1/budgets", {"period": "day", "soft_limit": None}, format="json")
    assert_error(answer, 400, answer.json()["error"]["param"])


def test_a_schedule(ready: Party) -> None:
    client, url = as_key(ready), "/api/v1/adapters/greeter/schedule"
    names = {"dataset": "chats", "cron": "30 2 * * *"}
    rules = {"window": "22:00-06:00", "grace_s": 900, "max_runs_per_day": 2, "misfire": "skip"}
    others = {
        "timezone": "Europe/Berlin",
        "hyperparameters": {"rank": 4},
        "validation_dataset": "tests",
        "is_paused": True,
        "skip_unchanged": False,
        **rules,
    }
    before = put(client, url, **names, **others)
    after = put(client, url, dataset="chats", cron="30 3 * * *")
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {"cron", "next_run_at", "updated_at"} and "cron" in changed
    told = put(client, url, **names, max_runs_per_day=None, validation_dataset=None, timezone="UTC")
    assert (told["max_runs_per_day"], told["validation_dataset"]) == (None, None)
    assert (told["timezone"], told["hyperparameters"]) == ("UTC", {"rank": 4})


def test_a_cron_line_that_never_fires_is_told_so(ready: Party) -> None:
    url = "/api/v1/adapters/greeter/schedule"
    body = {"dataset": "chats", "cron": "0 0 30 2 *"}
    error = assert_error(as_key(ready).put(url, body, format="json"), 400, "cron")
    assert "it never fires" in error["message"] and "not a cron line" not in error["message"]


def test_a_judge_keeps_its_key_for_its_address_alone(ready: Party) -> None:
    client, url = as_key(ready), "/api/v1/judges/strict"
    body = {"url": "http://127.0.0.1:1/v1", "model": "m"}

    def sealed() -> bytes:
        with tenant_scope(ready.tenant.id):
            return bytes(Judge.objects.get().sealed)

    put(client, url, **body, api_key="sk-1")
    before = sealed()
    assert put(client, url, **{**body, "model": "n"})["model"] == "n"
    assert sealed() == before
    moved = {**body, "url": "http://127.0.0.1:2/v1"}
    assert_error(client.put(url, moved, format="json"), 400, "api_key")
    put(client, url, **moved, api_key="")
    assert sealed() != before


def test_a_source(ready: Party) -> None:
    client, url = as_key(ready), "/api/v1/datasets/pulled/source"

    def sealed() -> bytes:
        with tenant_scope(ready.tenant.id):
            return bytes(DatasetSource.objects.get().sealed)

    body = {"kind": "hub", "repository": "owner/name"}
    put(client, url, **body, token="hf_x", cron="30 2 * * *", timezone="Europe/Berlin")
    before = sealed()
    told = put(client, url, **body)
    assert (told["cron"], told["timezone"]) == ("30 2 * * *", "Europe/Berlin")
    assert sealed() == before
    assert put(client, url, **body, cron="")["cron"] == ""
    put(client, url, **{**body, "repository": "owner/other"})
    assert sealed() != before


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"shares": [5]}, "shares", "This must be an object."),
        ({"shares": True}, "shares", "This must be an object."),
    ],
)
def test_no_message_names_pythons_types(ready: Party, body: Any, param: str, message: str) -> None:
    answer = as_user(ready.owner).put("/api/v1/capture", body, format="json")
    assert assert_error(answer, 400, param)["message"] == message
    answer = as_user(ready.owner).put("/api/v1/request-log", {"content": {"x": 1}}, format="json")
    assert "one of: off, on_request, all." in assert_error(answer, 400, "content")["message"]
