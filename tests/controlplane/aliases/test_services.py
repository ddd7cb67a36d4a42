"""Make, change, ramp and roll back aliases: services alone."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import pytest

from controlplane.adapters import deletion, promotion, retirement
from controlplane.adapters import services as adapters
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel, today
from controlplane.adapters.resolution import check_serving
from controlplane.aliases import services
from controlplane.aliases.contents import MAX_SYSTEM_PROMPT_CHARS, Contents, contents_of
from controlplane.aliases.models import Alias, AliasPart, AliasRevision
from controlplane.aliases.resolution import alias_resolve, bucket, models_list
from controlplane.errors import ApiError, Conflict, InvalidRequest, NotFound
from controlplane.events.audit.models import AuditEvent
from tests.controlplane.aliases.conftest import Status, add, parts
from tests.controlplane.conftest import Party


def said(alias: Alias) -> Contents:
    return contents_of(services.revision_get(alias=services.alias_get(name=alias.name)))


def answers(name: str, sticky: str = "") -> list[str]:
    """What a request to an alias gets."""
    plan = alias_resolve(name)
    assert plan is not None
    model = plan.canary if plan.target(sticky) == "canary" else plan.primary
    assert model is not None
    return [f"{weight:g}*{version}" for version, weight in model.parts]


def test_a_change_makes_a_revision(alias: Alias) -> None:
    revision = services.revision_get(alias=alias)
    assert (revision.number, revision.cause, revision.canary_percent) == (1, "created", 10)
    changed = services.alias_change(
        alias=alias, changes={"system_prompt": "Be brief."}, reason="short answers"
    )
    assert changed.revision_number == 2
    again = services.alias_change(alias=alias, changes={"system_prompt": "Be brief."})
    assert again.revision_number == 2, "nothing is different"
    assert said(alias).canary == parts("invoices@2"), "what was not changed stays"
    event = AuditEvent.objects.filter(action="alias.revised").get()
    assert event.before == {"revision": 1, "system_prompt_chars": 0}
    assert event.after == {
        "revision": 2,
        "cause": "changed",
        "reason": "short answers",
        "system_prompt_chars": 9,
    }
    with pytest.raises(Conflict) as caught:
        services.alias_change(alias=alias, changes={"warmth": "warm"}, if_revision=1)
    assert caught.value.code == "revision_changed"
    services.alias_change(alias=alias, changes={"warmth": "warm"}, if_revision=2)


def test_a_rollback_goes_back_and_further_back(alias: Alias) -> None:
    for percent in (20, 30):
        services.alias_ramp(alias=alias, percent=percent)
    assert services.alias_roll_back(alias=alias).revision_number == 4
    assert said(alias).canary_percent == 20
    services.alias_roll_back(alias=alias)
    assert said(alias).canary_percent == 10
    with pytest.raises(Conflict, match="no earlier revision"):
        services.alias_roll_back(alias=alias)
    services.alias_ramp(alias=alias, percent=70)
    services.alias_roll_back(alias=alias)
    assert said(alias).canary_percent == 10
    services.alias_roll_back(alias=alias, number=3)
    assert said(alias).canary_percent == 30
    copied = AliasRevision.objects.order_by("number").values_list("copied_from", flat=True)
    assert list(copied) == [None, None, None, 2, 1, None, 1, 3]
    with pytest.raises(NotFound):
        services.alias_roll_back(alias=alias, number=99)


def test_only_the_newest_revisions_are_kept(alias: Alias, monkeypatch: Any) -> None:
    monkeypatch.setattr(services, "MAX_REVISIONS", 3)
    for percent in range(20, 26):
        services.alias_ramp(alias=alias, percent=percent)
    numbers = AliasRevision.objects.order_by("number").values_list("number", flat=True)
    assert list(numbers) == [5, 6, 7]
    assert AliasPart.objects.count() == 6


def test_a_canary_becomes_the_primary(adapter: Adapter, letters: Adapter, alias: Alias) -> None:
    services.canary_promote(alias=alias, reason="better")
    adapter.refresh_from_db()
    assert adapter.live_version is not None and adapter.live_version.number == 2, "made live"
    assert said(alias) == Contents(primary=parts("invoices"))
    assert adapter.promotions.latest("created_at").reason == "better"
    with pytest.raises(Conflict, match="no canary"):
        services.canary_promote(alias=alias)
    blend = parts("invoices@3", "0.5*letters")
    services.alias_change(alias=alias, changes={"canary": blend, "canary_percent": 5})
    services.canary_promote(alias=alias)
    assert said(alias) == Contents(primary=blend)
    adapter.refresh_from_db()
    assert adapter.live_version is not None and adapter.live_version.number == 2


def test_live_targets_follow_the_adapter(adapter: Adapter, alias: Alias) -> None:
    services.alias_ramp(alias=alias, percent=0)
    assert answers("prod", "who") == ["1*invoices@1"]
    version = adapter.versions.get(number=3)
    promotion.adapter_version_promote(version=version)
    assert answers("prod", "who") == ["1*invoices@3"]
    # The same version by two parts is one adapter for the engine.
    both = parts("invoices", "0.25*invoices@3")
    services.alias_change(alias=alias, changes={"primary": both, "canary": ()})
    assert answers("prod") == ["1.25*invoices@3"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"primary": ()}, "primary"),
        ({"primary": parts("nobodys")}, "primary"),
        ({"primary": parts("prod")}, "primary"),  # an alias of an alias
        ({"primary": parts("tiny")}, "primary"),  # a base model
        ({"primary": parts("invoices@9")}, "primary"),
        ({"primary": parts("Invoices\0")}, "primary"),
        ({"primary": parts("invoices@2", "invoices@2")}, "primary"),
        ({"primary": parts("101*invoices@2")}, "primary"),
        ({"primary": parts("nan*invoices@2")}, "primary"),
        ({"primary": parts(*["invoices"] * 9)}, "primary"),
        ({"primary": parts(f"invoices@{2**63}")}, "primary"),
        ({"canary": (), "canary_percent": 5}, "canary_percent"),
        ({"canary_percent": 101}, "canary_percent"),
        ({"canary_percent": -1}, "canary_percent"),
        ({"warmth": "hot"}, "warmth"),
        ({"system_prompt": "x" * (MAX_SYSTEM_PROMPT_CHARS + 1)}, "system_prompt"),
        ({"system_prompt": "\0"}, "system_prompt"),
        ({"system_prompt": "\ud800"}, "system_prompt"),
        ({"sampling": {"temperature": 3}}, "sampling.temperature"),
        ({"sampling": {"n": 2}}, "sampling.n"),
        ({"sampling": {"stop": ["\0"]}}, "sampling.stop"),
        ({"json_schema": {"type": "strnig"}}, "json_schema"),
        ({"json_schema": {"type": "object"}}, None),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
        ({"json_schema": {"type": "string", "enum": ["\ud800"]}}, "json_schema"),
    ],
)
def test_bad_contents(alias: Alias, changes: dict[str, Any], param: str | None) -> None:
    if param is None:
        services.alias_change(alias=alias, changes=changes)
        return
    with pytest.raises(InvalidRequest) as caught:
        services.alias_change(alias=alias, changes=changes)
    assert caught.value.param == param, caught.value.message
    assert services.alias_get(name="prod").revision_number == 1


def test_names_are_of_one_kind(adapter: Adapter, letters: Adapter, alias: Alias) -> None:
    contents = Contents(primary=parts("letters"))
    for name, problem in (("tiny", "base model"), ("prod", "already exists")):
        with pytest.raises(Conflict, match=problem):
            services.alias_create(name=name, contents=contents)
    with pytest.raises(InvalidRequest):
        services.alias_create(name="No Slug", contents=contents)
    with pytest.raises(Conflict, match="the name of an alias"):
        adapters.adapter_create(name="prod")
    with pytest.raises(Conflict, match="the name of an alias"):
        adapters.adapter_version_create(
            name="prod", files={"adapter_config.json": 9, "adapter_model.safetensors": 9}
        )
    # The alias of an adapter's own name means this adapter, or a blend with it.
    with pytest.raises(InvalidRequest, match="must have a version of it"):
        services.alias_create(name="invoices", contents=contents)
    own = services.alias_create(
        name="invoices", contents=Contents(primary=parts("invoices@2", "0.5*letters"))
    )
    assert [model.name for model in models_list()] == ["tiny", "invoices", "letters", "prod"]
    with pytest.raises(InvalidRequest, match="must have a version of it"):
        services.alias_change(alias=own, changes={"canary": parts("letters")})


def test_targets_share_a_base_model(alias: Alias) -> None:
    other = BaseModel.objects.create(name="tiny2", revision="1" * 64, config={}, context_length=1)
    adapter = Adapter.objects.create(name="else", base_model=other)
    with pytest.raises(Conflict, match="No version of else is live"):
        services.alias_change(alias=alias, changes={"canary": parts("else")})
    add(adapter)
    with pytest.raises(InvalidRequest, match="several base models: tiny, tiny2"):
        services.alias_change(alias=alias, changes={"canary": parts("else")})
    services.alias_change(alias=alias, changes={"primary": parts("else"), "canary": ()})
    BaseModel.objects.filter(pk=other.pk).update(is_active=False)
    with pytest.raises(NotFound):
        alias_resolve("prod")


def test_what_has_ended_is_in_nobodys_way(adapter: Adapter, alias: Alias) -> None:
    """The sweep retires a version on its last day, also one that an alias names."""
    services.alias_change(alias=alias, changes={"primary": parts("invoices@1")})
    AdapterVersion.objects.filter(adapter=adapter, number__lt=3).update(status=Status.RETIRED)
    with pytest.raises(Conflict, match="retired, not ready"):
        services.alias_ramp(alias=alias, percent=60)
    services.alias_ramp(alias=alias, percent=0)
    services.canary_remove(alias=alias)
    services.alias_change(alias=alias, changes={"primary": parts("invoices@3")})
    with pytest.raises(Conflict, match="retired, not ready"):
        services.alias_change(alias=alias, changes={"primary": parts("invoices@1")})


def test_what_an_alias_names_is_kept(adapter: Adapter, letters: Adapter, alias: Alias) -> None:
    """Retiring and deleting are refused, with the alias's name, and change nothing then."""

    def refused(action: Any) -> None:
        with pytest.raises(Conflict, match="The alias prod needs") as caught:
            action()
        assert caught.value.code == "used_by_alias"
        assert not AdapterVersion.objects.exclude(status=Status.READY).exists()

    second = adapter.versions.get(number=2)
    refused(lambda: adapters.model_delete("invoices@2"))
    refused(lambda: adapters.model_delete("invoices"))
    refused(lambda: deletion.version_delete(version=second))
    refused(lambda: adapters.model_delete("invoices@1"))  # nothing was live before it
    promotion.adapter_version_promote(version=adapter.versions.get(number=3))
    adapters.model_delete("invoices@1")
    services.canary_remove(alias=alias)
    deletion.version_delete(version=second)
    with pytest.raises(Conflict, match="invoices@2 of revision 1 was deleted"):
        services.alias_roll_back(alias=alias, number=1)
    add(adapter, Status.REJECTED)
    with pytest.raises(Conflict) as caught:
        services.alias_change(alias=alias, changes={"canary": parts("invoices@4")})
    assert isinstance(caught.value, ApiError)


def end_today(adapter: Adapter, number: int) -> None:
    AdapterVersion.objects.filter(adapter=adapter, number=number).update(shutdown_date=today())


def test_the_end_of_a_version_ends_blends_with_it(
    adapter: Adapter, letters: Adapter, alias: Alias
) -> None:
    blend = parts("invoices@2", "0.5*letters")
    services.alias_change(alias=alias, changes={"primary": blend, "canary": ()})
    services.alias_create(name="invoices", contents=Contents(primary=parts("invoices@2")))
    assert [model.name for model in models_list()] == ["tiny", "invoices", "letters", "prod"]
    end_today(adapter, 2)
    plan = alias_resolve("prod")
    assert plan is not None and plan.primary.shutdown_date == today()
    with pytest.raises(NotFound, match="it has version 2"):
        check_serving(plan.primary)
    # Version 1 of invoices is live, but its name means the alias.
    assert [model.name for model in models_list()] == ["tiny", "letters"]


def test_a_day_that_has_come_is_not_set_for_what_an_alias_needs(
    adapter: Adapter, alias: Alias
) -> None:
    version = adapter.versions.get(number=2)
    with pytest.raises(Conflict, match="The alias prod needs"):
        retirement.version_deprecate(version=version, shutdown_date=today())
    assert answers("prod", "who")
    tomorrow = today() + dt.timedelta(days=1)
    retirement.version_deprecate(version=version, shutdown_date=tomorrow)


def test_the_primary_answers_after_the_end_of_the_canary(adapter: Adapter, alias: Alias) -> None:
    services.alias_ramp(alias=alias, percent=100)
    assert answers("prod", "who") == ["1*invoices@2"]
    end_today(adapter, 2)
    assert answers("prod", "who") == ["1*invoices@1"]
    assert retirement.versions_shut_down() == 1
    assert answers("prod", "who") == ["1*invoices@1"]


def test_a_share_is_even_and_sticky(alias: Alias) -> None:
    """Raising the share moves callers to the canary, and none away from it."""
    drawn = random.Random(7)
    callers = [f"user {drawn.random()}" for _ in range(4000)]
    before: set[str] = set()
    for percent in (0, 1, 10, 50, 100):
        services.alias_ramp(alias=alias, percent=percent)
        plan = alias_resolve("prod")
        assert plan is not None
        chosen = {caller for caller in callers if plan.target(caller) == "canary"}
        assert before <= chosen
        deviation = (len(callers) * percent * (100 - percent)) ** 0.5 / 100
        assert abs(len(chosen) - len(callers) * percent / 100) <= 5 * deviation
        assert {caller for caller in callers if plan.target(caller) == "canary"} == chosen
        before = chosen
    assert len({bucket(alias.pk, caller) for caller in callers}) == len(callers)


def test_another_tenant_sees_nothing(alias: Alias, globex: Party) -> None:
    from controlplane.tenancy.scoping import tenant_scope

    with tenant_scope(globex.tenant.id):
        with pytest.raises(NotFound):
            services.alias_get(name="prod")
        assert alias_resolve("prod") is None
        with pytest.raises(InvalidRequest, match="There is no adapter invoices"):
            services.alias_create(name="prod", contents=Contents(primary=parts("invoices")))
        assert not Alias.objects.exists()
        with pytest.raises(NotFound):
            services.alias_change(alias=alias, changes={"warmth": "warm"})
