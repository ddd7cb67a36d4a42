# ruff: noqa: F811  (fixtures)
"""Pages of aliases: what a viewer sees, and what a developer can change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from django.test import Client

from controlplane.aliases import ramps, services
from controlplane.aliases.contents import contents_of
from controlplane.aliases.models import Alias, Ramp
from tests.controlplane.aliases.conftest import adapter, alias, parts  # noqa: F401
from tests.controlplane.aliases.records import failed, now_of, records, settle  # noqa: F401
from tests.controlplane.conftest import Party
from tests.controlplane.console.conftest import browser_of

PAGE = "/console/aliases/prod"


@pytest.fixture
def owner(acme: Party) -> Client:
    return browser_of(acme.owner)


def test_a_viewer_sees_the_canary_and_no_buttons(
    alias: Alias, acme: Party, settle: Callable[..., None]
) -> None:
    settle(records(alias, "primary", 40), records(alias, "canary", 9), failed(alias, "canary", 1))
    viewer = browser_of(acme.viewer)
    text = viewer.get(PAGE).content.decode()
    for shown in ("10.0% of 10", "0.0% of 40", "invoices@2", "2 points worse", "Revisions"):
        assert shown in text, shown
    for hidden in ("Make it the primary", "Begin", "Set its share", "Go back", "Delete this"):
        assert hidden not in text, hidden
    assert "10.0% of 10" in viewer.get(f"{PAGE}/now").content.decode()
    assert "prod" in viewer.get("/console/aliases").content.decode()
    assert viewer.post(f"{PAGE}/share", {"percent": 50}).status_code == 403
    assert now_of(alias).canary_percent == 10


def test_a_rolled_back_canary_says_why(
    alias: Alias, acme: Party, settle: Callable[..., None]
) -> None:
    ramps.ramp_start(alias=alias, steps=ramps.DEFAULT_STEPS)
    settle(records(alias, "primary", 200), failed(alias, "canary", 60))
    text = browser_of(acme.viewer).get(PAGE).content.decode()
    assert "The canary was rolled back:" in text
    assert "errors 100.0 % of 60 requests against 0.0 % of 200" in text
    assert "stopped" in text


def test_an_alias_is_made_and_changed(alias: Alias, owner: Client) -> None:
    body = {
        **{"name": "letters-all", "primary": "0.7*invoices@1 + 0.3*invoices@3", "canary": ""},
        **{"canary_percent": 0, "warmth": "cold", "json_schema": '{"type": "object"'},
    }
    refused = owner.post("/console/new-alias", body)
    assert refused.status_code == 422
    assert "This is not JSON" in refused.content.decode()
    made = owner.post("/console/new-alias", body | {"json_schema": ""})
    assert made.headers["Location"] == "/console/aliases/letters-all"
    blend = services.alias_get(name="letters-all")
    assert contents_of(now_of(blend)).primary == parts("0.7*invoices@1", "0.3*invoices@3")

    shown = owner.get(f"{PAGE}/edit").content.decode()
    assert 'value="invoices@2"' in shown
    change = {"primary": "invoices@1", "canary": "invoices@3", "canary_percent": 20}
    change |= {"warmth": "warm", "if_revision": 1, "reason": "try it"}
    assert owner.post(f"{PAGE}/edit", change).status_code == 302
    current = now_of(alias)
    assert (current.number, current.canary_percent, current.reason) == (2, 20, "try it")
    late = owner.post(f"{PAGE}/edit", change | {"canary_percent": 30})
    assert late.status_code == 422
    assert "The current revision is 2, not 1: read it again." in late.content.decode()
    wrong = owner.post(f"{PAGE}/edit", change | {"primary": "a b"})
    assert "is not an adapter" in wrong.content.decode()


def test_the_buttons_of_a_canary(alias: Alias, owner: Client) -> None:
    def press(path: str, **body: object) -> None:
        assert owner.post(f"{PAGE}/{path}", body).headers["Location"] == PAGE

    press("share", percent=25, reason="so far so good")
    assert now_of(alias).canary_percent == 25
    press("share", percent=101)
    assert now_of(alias).canary_percent == 25
    press("guard", is_on="on", min_requests=80, errors_points=3, truncations_points="")
    found = now_of(alias).guard
    assert (found["min_requests"], found["errors_points"]) == (80, 3.0)
    assert found["truncations_points"] is None
    press("ramp", percents="5, 100", minutes=1, min_requests=10, at_end="promote")
    press("ramp/pause")
    assert Ramp.objects.get(alias=alias).state == "paused"
    assert "Resume the ramp" in owner.get(PAGE).content.decode()
    press("ramp/resume")
    press("ramp/stop")
    press("promote")
    assert now_of(alias).cause == "canary_promoted"
    press("rollback", number=1)
    assert (now_of(alias).copied_from, now_of(alias).canary_percent) == (1, 10)
    press("remove-canary")
    assert now_of(alias).cause == "canary_removed"
    press("remove-canary")
    assert "has no canary" in owner.get(PAGE).content.decode()
    assert owner.post(f"{PAGE}/ramp/nosuch").status_code == 404
    assert owner.post(f"{PAGE}/delete").headers["Location"] == "/console/aliases"
    assert owner.get(PAGE).status_code == 404


def test_strangers_find_nothing(alias: Alias, globex: Party) -> None:
    stranger = browser_of(globex.owner)
    assert stranger.get(PAGE).status_code == 404
    assert stranger.post(f"{PAGE}/share", {"percent": 50}).status_code == 404
    assert "prod" not in stranger.get("/console/aliases").content.decode()
