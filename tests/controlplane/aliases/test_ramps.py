# ruff: noqa: F811  (fixtures)
"""Ramps: a canary gets more and more requests, by a plan; and the API of canaries."""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from controlplane.aliases import ramps, services
from controlplane.aliases.models import Alias, Ramp, TargetCount
from controlplane.errors import Conflict, InvalidRequest
from controlplane.events.audit.models import AuditEvent
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import key_services
from tests.conftest import ROOT
from tests.controlplane.aliases.records import failed, now_of, records, settle  # noqa: F401
from tests.controlplane.conftest import Party, as_key, assert_error

State = Ramp.State
MINUTE = dt.timedelta(minutes=1)

STEPS = [
    {"percent": 1, "minutes": 10, "min_requests": 50},
    {"percent": 100, "minutes": 10, "min_requests": 0},
]


def ticks(ramp: Ramp, minutes: float) -> int:
    """Tick at so many minutes after the current step is due."""
    ramp.refresh_from_db()
    taken = ramps.ramps_advance(ramp.due_at + minutes * MINUTE)
    ramp.refresh_from_db()
    return taken


def test_a_ramp_goes_on_by_time_and_sample(alias: Alias, settle: Callable[..., None]) -> None:
    ramp = ramps.ramp_start(alias=alias, steps=STEPS)
    assert (now_of(alias).canary_percent, now_of(alias).cause) == (1, "ramped")
    settle(records(alias, "canary", 49))
    assert ticks(ramp, -1) == 0
    assert ticks(ramp, 1) == 0  # too few requests
    found = ramps.progress(ramp, ramp.due_at + MINUTE)
    assert found is not None
    assert (found.requests, found.min_requests, found.is_held) == (49, 50, True)
    settle(records(alias, "canary", 1))
    assert ticks(ramp, -1) == 0  # too soon
    assert ticks(ramp, 1) == 1
    assert (ramp.step, now_of(alias).canary_percent) == (1, 100)
    assert ticks(ramp, 1) == 1
    current = now_of(alias)
    assert (ramp.state, current.cause) == (State.DONE, "canary_promoted")
    assert current.canary_percent == 0
    assert ticks(ramp, 60) == 0


def test_a_ramp_can_end_without_a_promotion(alias: Alias) -> None:
    ramp = ramps.ramp_start(alias=alias, steps=[STEPS[1] | {"percent": 50}], at_end="stay")
    assert ticks(ramp, 1) == 1
    assert (ramp.state, now_of(alias).canary_percent) == (State.DONE, 50)


def test_a_rollback_stops_the_ramp(alias: Alias, settle: Callable[..., None]) -> None:
    ramp = ramps.ramp_start(alias=alias, steps=STEPS)
    settle(records(alias, "primary", 200), failed(alias, "canary", 60))
    ramp.refresh_from_db()
    assert ramp.state == State.STOPPED
    assert ramp.reason.startswith("errors 100.0 %")
    assert ticks(ramp, 60) == 0
    assert now_of(alias).canary_percent == 0


def test_any_other_change_stops_the_ramp(alias: Alias) -> None:
    ramp = ramps.ramp_start(alias=alias, steps=STEPS)
    services.alias_ramp(alias=alias, percent=7)
    assert ticks(ramp, -5) == 0
    assert (ramp.state, ramp.reason) == (State.STOPPED, "Revision 3 was made by another change.")
    assert now_of(alias).canary_percent == 7


def test_a_ramp_can_be_paused_and_stopped(alias: Alias) -> None:
    steps = [step | {"min_requests": 0} for step in STEPS]
    ramp = ramps.ramp_start(alias=alias, steps=steps)
    ramps.ramp_pause(alias=alias)
    assert ticks(ramp, 60) == 0
    with pytest.raises(Conflict, match="is paused"):
        ramps.ramp_pause(alias=alias)
    ramps.ramp_resume(alias=alias)
    assert ticks(ramp, -1) == 0
    ramps.ramp_cancel(alias=alias)
    assert ticks(ramp, 60) == 0
    assert (ramp.state, now_of(alias).canary_percent) == (State.STOPPED, 1)
    actions = AuditEvent.objects.filter(action__startswith="alias.ramp").order_by("seq")
    assert [event.action for event in actions] == [
        f"alias.ramp_{what}" for what in ("started", "paused", "resumed", "stopped")
    ]


def test_a_ramp_stops_where_a_step_cannot_be_taken(alias: Alias) -> None:
    ramp = ramps.ramp_start(alias=alias, steps=[STEPS[1]])
    canary = now_of(alias).parts.get(target="canary")
    canary.version.move("ready", "retired")  # as an operator may, past the checks
    assert ticks(ramp, 1) == 0
    assert ramp.state == State.STOPPED
    assert "retired" in ramp.reason
    assert now_of(alias).canary_percent == 100


@pytest.mark.parametrize(
    ("steps", "param"),
    [
        ([], "steps"),
        ([STEPS[0]] * 11, "steps"),
        ([STEPS[1], STEPS[0]], "steps"),
        ([{"percent": 0}], "steps.0.percent"),
        ([{"percent": True}], "steps.0.percent"),
        ([{"minutes": 1}], "steps.0.percent"),
        ([STEPS[0], {"percent": 50, "minutes": -1}], "steps.1.minutes"),
        ([{"percent": 5, "seconds": 1}], "steps.0.seconds"),
    ],
)
def test_plans_have_bounds(alias: Alias, steps: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ramps.ramp_start(alias=alias, steps=steps)
    assert caught.value.param == param
    assert now_of(alias).number == 1


def test_a_ramp_needs_a_canary(alias: Alias) -> None:
    services.canary_remove(alias=alias)
    with pytest.raises(Conflict):
        ramps.ramp_start(alias=alias, steps=STEPS)
    assert not Ramp.objects.exists()


def test_rows_go_with_the_alias(alias: Alias, settle: Callable[..., None]) -> None:
    ramps.ramp_start(alias=alias, steps=STEPS)
    settle(records(alias, "canary", 1))
    services.alias_delete(alias=alias)
    assert not TargetCount.objects.exists() and not Ramp.objects.exists()


class TestApi:
    NAME = "/api/v1/aliases/prod"

    def test_the_canary_beside_the_primary(
        self, alias: Alias, acme: Party, settle: Callable[..., None]
    ) -> None:
        settle(
            records(alias, "primary", 20), records(alias, "canary", 3), failed(alias, "canary", 1)
        )
        found = as_key(acme).get(f"{self.NAME}/canary").json()
        assert found["revision"] == 1
        assert found["canary"]["errors"]["value"] == 0.25
        assert found["canary"]["errors"]["low"] < 0.25 < found["canary"]["errors"]["high"]
        assert found["primary"]["requests"] == 20
        assert found["problems"] == []
        assert found["guard"]["errors_points"] == 2.0
        services.canary_remove(alias=alias)
        answer = as_key(acme).get(f"{self.NAME}/canary")
        assert assert_error(answer, 409)["code"] == "no_canary"

    def test_a_ramp_from_its_begin_to_its_stop(self, alias: Alias, acme: Party) -> None:
        client = as_key(acme)
        assert_error(client.get(f"{self.NAME}/timetable"), 404)
        begun = client.put(f"{self.NAME}/timetable", {}, format="json").json()
        assert [step["percent"] for step in begun["steps"]] == [1, 10, 50, 100]
        assert (begun["state"], begun["step"], begun["canary_requests"]) == ("running", 1, 0)
        assert client.post(f"{self.NAME}/timetable/pause").json()["state"] == "paused"
        assert client.post(f"{self.NAME}/timetable/resume").json()["state"] == "running"
        assert client.delete(f"{self.NAME}/timetable").json()["state"] == "stopped"
        assert_error(client.delete(f"{self.NAME}/timetable"), 409)
        bad = {"steps": [{"percent": 50}, {"percent": 5}]}
        assert_error(client.put(f"{self.NAME}/timetable", bad, format="json"), 400, "steps")

    def test_strangers_find_nothing(self, alias: Alias, globex: Party) -> None:
        client = as_key(globex)
        for path in ("canary", "timetable"):
            assert_error(client.get(f"{self.NAME}/{path}"), 404)
        assert_error(client.put(f"{self.NAME}/timetable", {}, format="json"), 404)
        with tenant_scope(alias.tenant_id):
            assert not Ramp.objects.exists()

    def test_the_commands_of_the_documentation(self, alias: Alias, acme: Party) -> None:
        text = (ROOT / "docs" / "adapters.md").read_text().partition("## Canary")[2]
        block = text.split("```sh\n")[1].split("```")[0].strip().replace("\\\n", " ")
        first, *lines = block.splitlines()
        assert first.partition(";")[0].endswith(self.NAME)
        for line in lines:
            words = shlex.split(line.replace("$api", f"http://host{self.NAME}"))
            given = {
                words[i]: words[i + 1] for i in range(1, len(words)) if words[i] in ("-X", "-d")
            }
            [url] = [word for word in words if word.startswith("http")]
            answer = as_key(acme).generic(
                given.get("-X", "GET"),
                urlsplit(url).path,
                given.get("-d", ""),
                content_type="application/json",
            )
            assert answer.status_code == 200, (line, answer.content)
        ramp = Ramp.objects.get(alias=alias)
        assert [(step["percent"], step["minutes"]) for step in ramp.steps] == [
            *((1, 30), (10, 60), (100, 30)),
        ]
        assert (ramp.state, now_of(alias).guard) == (
            State.STOPPED,
            {"errors_points": 5.0, "token_factor": None},
        )

    def test_a_key_of_other_models_changes_nothing(self, alias: Alias, acme: Party) -> None:
        key_services.api_key_update(
            public_id=acme.api_key.public_id, changes={"allowed_models": ["letters"]}
        )
        client = as_key(acme)
        assert client.put(f"{self.NAME}/timetable", {}, format="json").status_code == 403
        assert not Ramp.objects.exists()
