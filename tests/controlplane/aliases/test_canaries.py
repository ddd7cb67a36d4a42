# ruff: noqa: F811  (fixtures)
"""Canaries with the tests' database: counting, rolling back, and ramps."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import redis

from contract.queue import fair_queue
from controlplane.adapters.models import Adapter
from controlplane.aliases import counting, services, watching
from controlplane.aliases.comparison import compare
from controlplane.aliases.contents import Contents, contents_of
from controlplane.aliases.models import Alias, AliasRevision, TargetCount
from controlplane.aliases.verdict import Counts
from controlplane.errors import Conflict, InvalidRequest
from controlplane.events.audit.models import AuditEvent
from controlplane.infra.metrics import CANARY_ROLLBACKS
from controlplane.queue.dead_letters import quarantine_sync
from controlplane.tenancy.scoping import all_tenants
from controlplane.usage.models import UsageRecord
from controlplane.usage.services import usage_settle
from demo.stack import EmbeddedStack
from tests.controlplane.aliases.conftest import parts
from tests.controlplane.aliases.records import (  # noqa: F401
    Commits,
    failed,
    now_of,
    record,
    records,
    settle,
)
from tests.controlplane.conftest import Party


def counted(alias: Alias, target: str, number: int | None = None) -> Counts:
    return counting.counts_of(services.revision_get(alias=alias, number=number))[target]


def test_requests_count_once_for_the_target_that_answered(
    alias: Alias, settle: Callable[..., None]
) -> None:
    twice = record(alias, "canary", finish_reason="length", obeys_schema=True)
    settle([twice, twice], records(alias, "primary", 3))
    settle([twice])
    canary = counted(alias, "canary")
    assert (canary.requests, canary.truncated, canary.checked, canary.broken) == (1, 1, 1, 0)
    assert counted(alias, "primary").requests == 3
    # 20 ms after its turn, and 20 ms for each of ten further tokens
    assert list(canary.first_token) == [18]
    assert list(canary.token) == [31]
    assert TargetCount.objects.count() == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"finish_reason": "cancelled"}, None),
        ({"finish_reason": "error", "error_code": "context_length_exceeded"}, None),
        ({"finish_reason": "error", "error_code": "invalid_request"}, None),
        ({"finish_reason": "error", "error_code": "overloaded"}, None),
        ({"finish_reason": "error", "error_code": "deadline_exceeded"}, None),
        ({"finish_reason": "error", "error_code": "grammar_quota_exceeded"}, None),
        ({"finish_reason": "error", "error_code": "internal"}, (1, 1, 0, 0)),
        ({"finish_reason": "error", "error_code": "request_given_up"}, (1, 1, 0, 0)),
        ({"finish_reason": "error", "error_code": "adapter_incompatible"}, (1, 1, 0, 0)),
        (
            {"finish_reason": "error", "error_code": "answer_invalid", "obeys_schema": False},
            (1, 0, 1, 1),
        ),
        ({"obeys_schema": False}, (1, 0, 1, 1)),
        ({"obeys_schema": True}, (1, 0, 1, 0)),
        ({}, (1, 0, 0, 0)),
    ],
)
def test_only_the_models_and_our_faults_count(
    alias: Alias, fields: dict[str, Any], expected: tuple[int, ...] | None
) -> None:
    counts = counting.counts_of_record(record(alias, "canary", **fields))
    if expected is None:
        assert counts is None
    else:
        assert counts is not None
        assert (counts.requests, counts.errors, counts.checked, counts.broken) == expected


def test_batches_say_nothing_about_latency(alias: Alias) -> None:
    counts = counting.counts_of_record(record(alias, "canary", is_batch=True))
    assert counts == Counts(requests=1)


def test_requests_of_deleted_aliases_are_settled_uncounted(
    alias: Alias, acme: Party, settle: Callable[..., None]
) -> None:
    late = records(alias, "canary", 2)
    services.alias_delete(alias=alias)
    settle(late)
    assert UsageRecord.objects.count() == 2
    assert not TargetCount.objects.exists()


def test_another_tenants_record_does_not_count_here(
    alias: Alias, globex: Party, settle: Callable[..., None]
) -> None:
    settle([dataclasses.replace(record(alias, "canary"), tenant_id=str(globex.tenant.id))])
    with all_tenants(reason="test"):
        assert not TargetCount.objects.exists()


def test_without_a_canary_nothing_is_counted(alias: Alias, settle: Callable[..., None]) -> None:
    services.canary_remove(alias=alias)
    settle(records(alias, "primary", 2))
    assert not TargetCount.objects.exists()


def test_a_bad_canary_is_rolled_back(alias: Alias, settle: Callable[..., None]) -> None:
    before = CANARY_ROLLBACKS._value.get()
    settle(
        records(alias, "primary", 200), failed(alias, "canary", 20), records(alias, "canary", 60)
    )
    current = now_of(alias)
    assert (current.number, current.canary_percent, current.cause) == (2, 0, "canary_failed")
    assert current.reason == (
        "errors 25.0 % of 80 requests against 0.0 % of 200; "
        "threshold: 2 points worse with 99 % confidence"
    )
    assert current.actor_type == "system"
    assert current.parts.filter(target="canary").exists()  # so a person can ramp again
    event = AuditEvent.objects.filter(action="alias.revised").latest("seq")
    assert event.after["reason"] == current.reason
    assert CANARY_ROLLBACKS._value.get() == before + 1
    services.alias_ramp(alias=alias, percent=5)
    assert now_of(alias).canary_percent == 5


def roll_back(alias: Alias, number: int | None = None) -> tuple[int | None, int]:
    """-> which revision holds again, and its canary's percent."""
    services.alias_roll_back(alias=alias, number=number)
    return now_of(alias).copied_from, now_of(alias).canary_percent


def test_a_rollback_passes_over_a_canary_that_failed(adapter: Adapter) -> None:
    alias = services.alias_create(name="prod", contents=Contents(primary=parts("invoices@1")))
    third = {"canary": parts("invoices@3"), "canary_percent": 20}
    services.alias_change(alias=alias, changes=third)  # 2: another canary, which is good
    second = {"canary": parts("invoices@2"), "canary_percent": 10}
    services.alias_change(alias=alias, changes=second)  # 3
    services.alias_ramp(alias=alias, percent=50)  # 4
    watching.canary_fail(now_of(alias), "bad")  # 5
    services.alias_change(alias=alias, changes={"system_prompt": "Be brief."})  # 6
    assert roll_back(alias) == (5, 0)  # 7
    assert roll_back(alias) == (2, 20)  # 8: neither 4 nor 3
    assert contents_of(now_of(alias)).canary == parts("invoices@3")
    assert roll_back(alias) == (1, 0)  # 9
    with pytest.raises(Conflict) as caught:
        services.alias_roll_back(alias=alias)
    assert caught.value.code == "no_earlier_revision"


def test_a_person_may_give_a_failed_canary_requests_again(alias: Alias) -> None:
    watching.canary_fail(now_of(alias), "bad")  # 2
    with pytest.raises(Conflict):  # 1 gave it requests
        services.alias_roll_back(alias=alias)
    assert roll_back(alias, 1) == (1, 10)  # 3: by its number
    services.alias_change(alias=alias, changes={"system_prompt": "Be brief."})  # 4
    assert roll_back(alias) == (1, 10)  # 5: as 3, which is newer than the failure
    services.alias_ramp(alias=alias, percent=5)  # 6
    services.alias_ramp(alias=alias, percent=9)  # 7
    assert roll_back(alias) == (6, 5)  # 8
    watching.canary_fail(now_of(alias), "bad again")  # 9
    with pytest.raises(Conflict):  # 3 to 8 gave it requests, and 2 says the same as 9
        services.alias_roll_back(alias=alias)
    services.alias_change(alias=alias, changes={"system_prompt": "Be quick."})  # 10
    assert roll_back(alias) == (9, 0)


def test_a_good_canary_stays(alias: Alias, settle: Callable[..., None]) -> None:
    for _ in range(3):
        settle(
            records(alias, "primary", 95),
            failed(alias, "primary", 5),
            records(alias, "canary", 95),
            failed(alias, "canary", 5),
        )
    assert now_of(alias).number == 1


def test_one_that_cannot_be_judged_does_not_stop_the_others(
    alias: Alias, settle: Callable[..., None]
) -> None:
    other = services.alias_create(
        name="other",
        contents=Contents(primary=parts("invoices"), canary=parts("invoices@3"), canary_percent=5),
    )
    AliasRevision.objects.filter(alias=alias).update(sampling={"n": 2})  # of an older release
    batches = [failed(alias, "canary", 100), records(alias, "primary", 100)]
    settle(*batches, failed(other, "canary", 100), records(other, "primary", 100))
    assert now_of(alias).canary_percent == 10
    assert now_of(other).canary_percent == 0


def test_what_happened_in_an_earlier_revision_does_not_count(
    alias: Alias, settle: Callable[..., None]
) -> None:
    bad = failed(alias, "canary", 100)  # which run while somebody changes the alias
    services.alias_ramp(alias=alias, percent=20)
    settle(bad, records(alias, "primary", 200))
    current = now_of(alias)
    assert (current.number, current.canary_percent) == (2, 20)
    assert counted(alias, "canary", 1).errors == 100
    assert counted(alias, "canary").requests == 0


def test_a_persons_change_at_the_same_time_wins(alias: Alias, settle: Callable[..., None]) -> None:
    services.alias_change(alias=alias, changes={"guard": {"is_on": False}})
    settle(records(alias, "primary", 200), failed(alias, "canary", 100))
    judged = now_of(alias)
    services.alias_ramp(alias=alias, percent=40)
    with pytest.raises(Conflict):
        watching.canary_fail(judged, "too late")
    watching.canaries_watch([judged.pk])
    assert now_of(alias).canary_percent == 40


def test_the_task_looks_where_an_accountant_died(
    alias: Alias, django_capture_on_commit_callbacks: Commits
) -> None:
    with django_capture_on_commit_callbacks(execute=False):
        usage_settle(records(alias, "primary", 200) + failed(alias, "canary", 60))
    assert now_of(alias).canary_percent == 10
    watching.canaries_watch_all()
    assert now_of(alias).canary_percent == 0


def test_with_all_callers_a_canary_is_compared_with_the_step_before(
    alias: Alias, settle: Callable[..., None]
) -> None:
    settle(records(alias, "primary", 200), records(alias, "canary", 10))
    services.alias_ramp(alias=alias, percent=100)
    settle(records(alias, "canary", 60), failed(alias, "canary", 40))
    found = compare(services.revision_get(alias=alias, number=2))
    assert (found.primary_since, found.primary.requests) == (1, 200)
    assert now_of(alias).cause == "canary_failed"


@pytest.mark.parametrize("canary", ["invoices@2", "letters"])
def test_a_quarantined_canary_is_rolled_back(
    alias: Alias,
    letters: Adapter,
    canary: str,
    stack: EmbeddedStack,
    django_capture_on_commit_callbacks: Commits,
) -> None:
    """Its requests are refused, so there is nothing to count."""
    services.alias_change(alias=alias, changes={"canary": parts(canary)})
    of_live = services.alias_create(
        name="of-live", contents=Contents(primary=parts("invoices@2"), canary=parts("invoices"))
    )
    services.alias_ramp(alias=of_live, percent=10)
    judged = now_of(alias)
    part = judged.parts.get(target="canary")
    version = part.version or letters.live_version
    assert version is not None
    pool = uuid.uuid4().hex[:8]
    with redis.Redis.from_url(stack.env["REDIS_URL"], protocol=2) as client:
        client.hset(fair_queue.quarantine_key(pool), version.digest, 1_700_000_000)
        for _ in range(2):
            with django_capture_on_commit_callbacks(execute=True):
                quarantine_sync(client, pool)
    current = now_of(alias)
    assert (current.number, current.canary_percent) == (judged.number + 1, 0)
    assert current.cause == "canary_failed"
    assert current.reason == watching.QUARANTINED
    assert now_of(of_live).canary_percent == 10


@pytest.mark.parametrize(
    ("guard", "param"),
    [
        ({"errors_points": 51}, "guard.errors_points"),
        ({"errors_points": "2"}, "guard.errors_points"),
        ({"min_requests": 5}, "guard.min_requests"),
        ({"min_requests": 50.5}, "guard.min_requests"),
        ({"min_requests": None}, "guard.min_requests"),
        ({"confidence": 1}, "guard.confidence"),
        ({"is_on": 1}, "guard.is_on"),
        ({"token_factor": float("nan")}, "guard.token_factor"),
        ({"nosuch": 1}, "guard.nosuch"),
    ],
)
def test_guards_have_bounds(alias: Alias, guard: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        services.alias_change(alias=alias, changes={"guard": guard})
    assert caught.value.param == param


def test_a_guard_holds_for_later_revisions(alias: Alias) -> None:
    services.alias_change(alias=alias, changes={"guard": {"errors_points": 10, "is_on": True}})
    services.alias_ramp(alias=alias, percent=30)
    assert now_of(alias).guard == {"errors_points": 10.0}
    assert compare(now_of(alias)).guard.errors_points == 10.0
