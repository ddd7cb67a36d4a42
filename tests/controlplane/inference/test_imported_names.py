"""A repository of the Hub, as LoRAX's clients name adapters, means what was imported from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from controlplane.adapters import services
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.errors import InvalidRequest, NotFound, PermissionDenied
from controlplane.inference import access
from controlplane.inference.model_selector import ModelSelector
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.key_services import api_key_create
from controlplane.usage.limits.services import rate_limit_set
from tests.controlplane.conftest import Party

REPOSITORY = "org/name"
Status = AdapterVersion.Status


def imported(
    adapter: Adapter, number: int, repository: str = REPOSITORY, status: str = Status.READY
) -> AdapterVersion:
    return AdapterVersion.objects.create(
        adapter=adapter,
        number=number,
        status=status,
        source=AdapterVersion.Source.IMPORT,
        digest=f"{adapter.name}{number}".ljust(64, "0"),
        origin={"host": "hub", "repository": repository, "revision": "main"},
    )


@pytest.fixture
def invoices(acme: Party, base_model: BaseModel) -> Iterator[Adapter]:
    access._names_known.forget(*access._names_known.keys())
    with tenant_scope(acme.tenant.id):
        yield services.adapter_create(name="invoices")


def answering(party: Party, name: str = REPOSITORY) -> str:
    """What the name means now, whatever was kept."""
    access._names_known.forget(*access._names_known.keys())
    caller = access.resolve_now(auth.authenticate(party.header), ModelSelector.model(name))
    (version, weight), *others = caller.model.parts
    assert (caller.model.name, weight, others) == (name, 1.0, [])
    return f"{version.adapter.name}@{version.number}"


def test_it_means_the_newest_that_is_ready_until_one_is_live(
    acme: Party, invoices: Adapter
) -> None:
    first = imported(invoices, 1)
    imported(invoices, 2)
    imported(invoices, 3, status=Status.REJECTED)
    imported(invoices, 4, repository="org/other")
    assert answering(acme) == "invoices@2"
    invoices.live_version = first
    invoices.save()
    assert answering(acme) == "invoices@1"
    assert answering(acme, "org/other") == "invoices@4"


def test_what_several_adapters_were_made_of_is_refused_with_their_names(
    acme: Party, invoices: Adapter
) -> None:
    imported(invoices, 1)
    other = services.adapter_create(name="letters")
    live = imported(other, 1)
    with pytest.raises(InvalidRequest, match="`invoices`, `letters`"):
        answering(acme)
    other.live_version = live
    other.save()
    assert answering(acme) == "letters@1"


@pytest.mark.parametrize("name", ["org/nothing", "/", "org/", "org/name/1", "Org/name"])
def test_what_was_not_imported_is_not_there(acme: Party, invoices: Adapter, name: str) -> None:
    imported(invoices, 1)
    with pytest.raises(NotFound) as caught:
        answering(acme, name)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_stranger_finds_nothing(acme: Party, globex: Party, invoices: Adapter) -> None:
    imported(invoices, 1)
    with pytest.raises(NotFound):
        answering(globex)


def test_the_limits_and_the_rules_are_those_of_the_adapter(acme: Party, invoices: Adapter) -> None:
    imported(invoices, 1)
    limit = rate_limit_set(model="invoices", requests_per_minute=5)
    named = ModelSelector.model(REPOSITORY)
    caller = access.resolve_now(auth.authenticate(acme.header), named)
    assert [policy.id for policy in caller.limits.policies] == [limit.id.hex]
    for allowed in ("letters", "invoices"):  # a bound key names the adapter itself
        _, key = api_key_create(name=allowed, rules=KeyRules(allowed_models=(allowed,)))
        with pytest.raises(PermissionDenied):
            access.resolve_now(auth.authenticate(f"Bearer {key}"), named)
