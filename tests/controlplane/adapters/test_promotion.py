"""Promote, roll back and hold: services, addresses and pages, and who may use them."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.test import Client

from controlplane.adapters import promotion, services
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel, Promotion
from controlplane.adapters.promotion import live_stack
from controlplane.errors import Conflict, InvalidRequest
from controlplane.events.audit.models import AuditEvent
from controlplane.tenancy.scoping import tenant_scope
from tests.conftest import ROOT
from tests.controlplane.conftest import Party, as_key, as_user, assert_error

Status = AdapterVersion.Status
Cause = Promotion.Cause
NAME = "/api/v1/adapters/invoices"


@pytest.fixture
def adapter(acme: Party, base_model: BaseModel) -> Iterator[Adapter]:
    with tenant_scope(acme.tenant.id):
        yield Adapter.objects.create(name="invoices", base_model=base_model)


def add(adapter: Adapter, status: str = Status.READY) -> AdapterVersion:
    """The next version, as the check leaves it."""
    number = adapter.versions.count() + 1
    version = AdapterVersion.objects.create(
        adapter=adapter, number=number, status=status, digest=f"{number:064x}"
    )
    if status == Status.READY:
        promotion.ready_apply(promotion.lock(adapter.pk), version)
    return version


def live(adapter: Adapter) -> int | None:
    adapter.refresh_from_db()
    return adapter.live_version.number if adapter.live_version else None


def history(adapter: Adapter) -> list[tuple[int | None, int | None, str]]:
    rows = Promotion.objects.filter(adapter=adapter).order_by("created_at")
    return [(row.previous_number, row.number, row.cause) for row in rows]


def promote(adapter: Adapter, number: int, reason: str = "") -> None:
    version = adapter.versions.get(number=number)
    promotion.adapter_version_promote(version=version, reason=reason)


def test_the_first_version_goes_live_and_the_next_waits(adapter: Adapter) -> None:
    add(adapter)
    add(adapter)
    assert live(adapter) == 1
    promote(adapter, 2, "better dates")
    assert live(adapter) == 2
    promote(adapter, 2)  # again: nothing changes
    assert history(adapter) == [(None, 1, "first"), (1, 2, "promoted")]
    row = Promotion.objects.get(number=2)
    assert (row.reason, row.actor_type) == ("better dates", "system")
    event = AuditEvent.objects.filter(action="adapter.live_version_set").latest("seq")
    assert event.after == {"live_version": 2, "cause": "promoted", "reason": "better dates"}


def test_with_the_policy_immediate_a_newer_version_goes_live(adapter: Adapter) -> None:
    promotion.promotion_policy_set(adapter=adapter, policy="immediate")
    add(adapter)
    second, third = (
        AdapterVersion.objects.create(adapter=adapter, number=number, status=Status.READY)
        for number in (2, 3)
    )
    # Their checks end in the other order.
    for version in (third, second):
        promotion.ready_apply(promotion.lock(adapter.pk), version)
    assert live(adapter) == 3
    assert history(adapter) == [(None, 1, "first"), (1, 3, "policy")]


@pytest.mark.parametrize(
    "status", [Status.UPLOADING, Status.VALIDATING, Status.REJECTED, Status.RETIRED]
)
def test_only_a_ready_version_can_be_live(adapter: Adapter, status: str) -> None:
    add(adapter)
    other = add(adapter, status)
    with pytest.raises(Conflict, match=f"Version 2 is {status}"):
        promotion.adapter_version_promote(version=other)
    assert live(adapter) == 1


def test_rolling_back_undoes_promotions_one_by_one(adapter: Adapter) -> None:
    for _ in range(4):
        add(adapter)
    for number in (2, 4, 3):
        promote(adapter, number)
    for number in (4, 2, 1):
        promotion.adapter_roll_back(adapter=adapter, reason="it swears")
        assert live(adapter) == number
    with pytest.raises(Conflict, match="No earlier version"):
        promotion.adapter_roll_back(adapter=adapter)
    promote(adapter, 3)
    promotion.adapter_roll_back(adapter=adapter)
    assert live(adapter) == 1


def test_a_rollback_passes_over_what_is_no_longer_ready(adapter: Adapter) -> None:
    for _ in range(3):
        add(adapter)
    promote(adapter, 2)
    promote(adapter, 3)
    adapter.versions.filter(number=2).update(status=Status.RETIRED)
    promotion.adapter_roll_back(adapter=adapter)
    assert live(adapter) == 1


def test_a_version_that_was_held_never_goes_live_because_another_is_retired(
    adapter: Adapter,
) -> None:
    for _ in range(3):
        add(adapter)
    promote(adapter, 2)
    services.model_delete("invoices@2")
    assert live(adapter) == 1
    services.model_delete("invoices@1")
    assert live(adapter) is None
    assert history(adapter)[-2:] == [(2, 1, "retired"), (1, None, "retired")]
    add(adapter)
    assert live(adapter) == 4


def test_reasons_are_bounded(adapter: Adapter) -> None:
    version = add(adapter)
    for call in (
        lambda: promotion.adapter_version_promote(version=version, reason="x" * 501),
        lambda: promotion.adapter_roll_back(adapter=adapter, reason="x" * 501),
    ):
        with pytest.raises(InvalidRequest):
            call()


def test_the_stack_against_a_slow_one_in_random_games() -> None:
    """Each promotion keeps a copy of the whole stack; going back takes a copy out."""
    for seed in range(200):
        chance = random.Random(seed)
        rows: list[Promotion] = []
        slow: list[int] = []
        for _ in range(30):
            if len(slow) > 1 and chance.random() < 0.4:
                slow = slow[: chance.randrange(1, len(slow))]
                rows.append(Promotion(number=slow[-1], cause=Cause.ROLLED_BACK))
            else:
                # Never a number that is in it: the games then have one meaning.
                number = chance.choice([n for n in range(60) if n not in slow])
                slow = [*slow, number]
                rows.append(Promotion(number=number, cause=Cause.PROMOTED))
            assert live_stack(rows) == slow


def test_over_http(acme: Party, adapter: Adapter) -> None:
    client = as_key(acme)
    add(adapter)
    add(adapter)
    answer = client.post(f"{NAME}/versions/2/promote", {"reason": "ready"}, format="json")
    assert (answer.status_code, answer.json()["live_version"]) == (200, 2)
    answer = client.post(f"{NAME}/rollback", {"reason": "no"}, format="json")
    assert (answer.status_code, answer.json()["live_version"]) == (200, 1)
    error = assert_error(client.post(f"{NAME}/rollback"), 409)
    assert error["code"] == "no_earlier_version"
    rows = client.get(f"{NAME}/history").json()["data"]
    assert [(row["version"], row["cause"], row["reason"]) for row in rows] == [
        (1, "rolled_back", "no"),
        (2, "promoted", "ready"),
        (1, "first", ""),
    ]
    assert rows[0]["actor_type"] == "api_key" and rows[0]["actor_name"]
    assert_error(client.post(f"{NAME}/versions/9/promote"), 404)
    add(adapter, Status.REJECTED)
    error = assert_error(client.post(f"{NAME}/versions/3/promote"), 409)
    assert error["code"] == "version_not_ready"
    body = {"promotion_policy": "immediate"}
    changed = client.patch(NAME, body, format="json").json()
    assert changed["promotion_policy"] == "immediate"
    error = assert_error(
        client.patch(NAME, {"promotion_policy": "maybe"}, format="json"), 400, "promotion_policy"
    )
    assert "hold, immediate" in error["message"]


def test_the_commands_of_the_documentation(acme: Party, adapter: Adapter) -> None:
    add(adapter)
    add(adapter)
    page = (ROOT / "docs" / "adapters.md").read_text()
    section = page.split("\n## Which version is live\n")[1]
    block = section.split("```sh\n")[1].split("```")[0]
    first, *lines = block.strip().splitlines()
    base = first.partition("=")[2].partition(";")[0]
    for line in lines:
        words = shlex.split(line.replace("$api", base))
        given = {words[i]: words[i + 1] for i in range(1, len(words)) if words[i] in ("-X", "-d")}
        [url] = [word for word in words if word.startswith("http")]
        answer = as_key(acme).generic(
            given.get("-X", "GET"),
            urlsplit(url).path,
            given.get("-d", ""),
            content_type="application/json",
        )
        assert answer.status_code == 200, (line, answer.content)
    assert history(adapter) == [(None, 1, "first"), (1, 2, "promoted"), (2, 1, "rolled_back")]


def test_others_cannot(acme: Party, globex: Party, adapter: Adapter) -> None:
    add(adapter)
    add(adapter)
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("post", f"{NAME}/versions/2/promote", {}),
        ("post", f"{NAME}/rollback", {}),
        ("patch", NAME, {"promotion_policy": "immediate"}),
    ]
    for method, url, body in calls:
        stranger = getattr(as_key(globex), method)(url, body, format="json")
        assert stranger.status_code == 404, url
        viewer = getattr(as_user(acme.viewer), method)(url, body, format="json")
        assert viewer.status_code == 403, url
    browser = Client()
    browser.force_login(acme.viewer)
    for page in ("versions/2/promote", "rollback", "policy"):
        url = f"/console/adapters/invoices/{page}"
        assert browser.post(url, {"promotion_policy": "immediate"}).status_code == 403, url
    assert "Make live" not in browser.get("/console/adapters/invoices/versions/2").content.decode()
    assert (live(adapter), adapter.promotion_policy) == (1, "hold")


def test_in_the_console(acme: Party, adapter: Adapter) -> None:
    add(adapter)
    add(adapter)
    browser = Client()
    browser.force_login(acme.owner)
    page = "/console/adapters/invoices"
    html = browser.get(f"{page}/versions/2").content.decode()
    assert "Make live" in html and "get version 1 until somebody makes this one live" in html
    answer = browser.post(f"{page}/versions/2/promote", {"reason": "ok"}, follow=True)
    assert "Version 2 is live." in answer.content.decode()
    assert "Roll back to version 1" in answer.content.decode()
    answer = browser.post(f"{page}/rollback", follow=True)
    assert "Version 1 is live again." in answer.content.decode()
    assert "Roll back" not in answer.content.decode()
    answer = browser.post(f"{page}/rollback", follow=True)
    assert "No earlier version" in answer.content.decode()
    answer = browser.post(f"{page}/policy", {"promotion_policy": "immediate"}, follow=True)
    assert '<option value="immediate" selected>' in answer.content.decode()
    assert browser.post(f"{page}/policy", {"promotion_policy": "x"}).status_code == 404
    assert (live(adapter), adapter.promotion_policy) == (1, "immediate")
