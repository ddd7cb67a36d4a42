"""What a request's model name means, tenant by tenant."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from controlplane.adapters import resolution, services
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.errors import NotFound
from controlplane.tenancy.scoping import TenantScopeError, tenant_scope
from tests.controlplane.conftest import Party

Status = AdapterVersion.Status


def make_version(adapter: Adapter, number: int, status: str = Status.READY) -> AdapterVersion:
    return AdapterVersion.objects.create(adapter=adapter, number=number, status=status)


@pytest.fixture
def acme_adapter(acme: Party, base_model: BaseModel) -> Iterator[Adapter]:
    """acme's "invoices": versions 1 and 2 ready, 2 live, 3 rejected. In acme's scope."""
    with tenant_scope(acme.tenant.id):
        adapter = services.adapter_create(name="invoices")
        make_version(adapter, 1)
        adapter.live_version = make_version(adapter, 2)
        adapter.save()
        make_version(adapter, 3, Status.REJECTED)
        yield adapter


@pytest.mark.parametrize(
    ("name", "number"), [("invoices", 2), ("invoices@1", 1), ("invoices@2", 2)]
)
def test_adapter_and_version(acme_adapter: Adapter, name: str, number: int) -> None:
    found = resolution.model_resolve(name)
    assert found.version is not None
    assert (found.name, found.version.number, found.base_model.name) == (name, number, "tiny")


def test_one_query(acme_adapter: Adapter, django_assert_num_queries: object) -> None:
    with django_assert_num_queries(1):  # type: ignore[operator]
        found = resolution.model_resolve("invoices")
        assert found.version is not None
        assert found.version.config_key
        assert found.base_model.revision


def test_base_model(acme_adapter: Adapter) -> None:
    found = resolution.model_resolve("tiny")
    assert (found.version, found.base_model.name) == (None, "tiny")


UNKNOWN = ("nothing", "invoices@3", "invoices@9", "invoices@0", "invoices@", "@1", "", "tiny@1")
HOSTILE = ("invoices\0", "Invoices", "invoices@01", "../tiny", "x" * 500, "invoices\n", "٣")


@pytest.mark.parametrize("name", UNKNOWN + HOSTILE)
def test_anything_else_is_not_found(acme_adapter: Adapter, name: str) -> None:
    with pytest.raises(NotFound) as caught:
        resolution.model_resolve(name)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_adapter_without_a_ready_version_is_not_found(acme: Party, base_model: BaseModel) -> None:
    with tenant_scope(acme.tenant.id):
        services.adapter_create(name="empty")
        with pytest.raises(NotFound):
            resolution.model_resolve("empty")


@pytest.mark.parametrize("name", ["invoices", "invoices@1"])
def test_a_stranger_gets_the_answer_for_a_missing_model(
    acme_adapter: Adapter, globex: Party, name: str
) -> None:
    bodies = []
    for _ in range(2):
        with tenant_scope(globex.tenant.id), pytest.raises(NotFound) as caught:
            resolution.model_resolve(name)
        bodies.append(caught.value.response().content)
        Adapter.objects.all().delete()  # in acme's scope, which is the outer one
    assert bodies[0] == bodies[1]


def test_outside_a_scope_it_raises(base_model: BaseModel) -> None:
    with pytest.raises(TenantScopeError):
        resolution.model_resolve("invoices")


def test_list_is_what_resolves(acme_adapter: Adapter, globex: Party) -> None:
    services.adapter_create(name="empty")
    names = [model.name for model in resolution.models_list()]
    assert names == ["tiny", "invoices"]
    for name in names:
        assert resolution.model_resolve(name).name == name
    with tenant_scope(globex.tenant.id):
        assert [model.name for model in resolution.models_list()] == ["tiny"]


def test_retired_base_model_takes_its_adapters_along(acme_adapter: Adapter) -> None:
    BaseModel.objects.update(is_active=False)
    assert resolution.models_list() == []
    for name in ("tiny", "invoices"):
        with pytest.raises(NotFound):
            resolution.model_resolve(name)
