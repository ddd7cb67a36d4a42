"""The day from which a base model, and every adapter of it, answers no more."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.adapters import resolution, services
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel, today
from controlplane.errors import InvalidRequest, NotFound
from controlplane.events.audit.models import AuditEvent
from controlplane.files.batches.validation import validate
from controlplane.gateway.models import ServedModelSerializer
from controlplane.inference import access
from controlplane.inference.model_selector import ModelSelector
from controlplane.tenancy import epochs
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants import auth
from controlplane.tenants.models import User
from controlplane.usage.limits.admit import NO_LIMITS
from tests.controlplane.conftest import (
    TINY_CONFIG,
    Party,
    as_key,
    as_user,
    assert_error,
    make_operator,
)
from tests.controlplane.console.conftest import browser_of

DAY = dt.timedelta(days=1)
URL = "/ops/v1/base-models/tiny"
NAMES = ("tiny", "invoices", "invoices@1", "ft:tiny:acme:invoices:1")


@pytest.fixture
def operator(db: None) -> User:
    return make_operator("ops@lorikeet.example")


@pytest.fixture
def adapter(acme: Party, base_model: BaseModel) -> Iterator[Adapter]:
    """acme's "invoices", whose version 1 is live. In acme's scope."""
    with tenant_scope(acme.tenant.id):
        made = services.adapter_create(name="invoices")
        made.live_version = AdapterVersion.objects.create(
            adapter=made, number=1, status=AdapterVersion.Status.READY, digest="d1" * 32
        )
        made.save()
        yield made


def ends_on(day: dt.date | None) -> None:
    services.base_model_shutdown_set(
        base_model=BaseModel.objects.get(name="tiny"), shutdown_date=day
    )


def changes() -> list[tuple[Any, Any]]:
    """What the platform's own trail tells of changed base models: before and after."""
    with all_tenants(reason="test"):
        events = AuditEvent.objects.filter(action="base_model.changed").order_by("seq")
        return list(events.values_list("before", "after"))


class TestOperator:
    def test_sets_and_clears_it(self, operator: User, base_model: BaseModel) -> None:
        client = as_user(operator)
        row = client.patch(URL, {"shutdown_date": "2999-12-31"}, format="json").json()
        assert (row["shutdown_date"], row["is_active"]) == ("2999-12-31", True)
        row = client.patch(URL, {"shutdown_date": None}, format="json").json()
        assert row["shutdown_date"] is None
        assert changes() == [
            ({"shutdown_date": None}, {"shutdown_date": "2999-12-31"}),
            ({"shutdown_date": "2999-12-31"}, {"shutdown_date": None}),
        ]

    def test_sets_both_or_neither(self, operator: User, base_model: BaseModel) -> None:
        client = as_user(operator)
        body = {"is_active": False, "shutdown_date": "2999-12-31"}
        row = client.patch(URL, body, format="json").json()
        assert (row["is_active"], row["shutdown_date"]) == (False, "2999-12-31")
        length = len(changes())
        assert client.patch(URL, {}, format="json").json() == row
        assert len(changes()) == length == 2

    @pytest.mark.parametrize("day", ["tomorrow", "2999-02-30", "2999-12-31T00:00:00Z", 1, ""])
    def test_names_what_is_no_day(self, operator: User, base_model: BaseModel, day: Any) -> None:
        answer = as_user(operator).patch(URL, {"shutdown_date": day}, format="json")
        assert_error(answer, 400, "shutdown_date")
        assert changes() == []

    def test_sets_it_in_the_admin(self, operator: User, base_model: BaseModel) -> None:
        client = Client()
        client.force_login(operator)
        url = reverse("admin:adapters_basemodel_change", args=[base_model.pk])
        form = {"context_length": "128", "max_rank": "256", "is_active": "on"}
        answer = client.post(url, {**form, "shutdown_date": "2999-12-31"})
        assert answer.status_code == 302, answer.context["errors"]
        base_model.refresh_from_db()
        assert base_model.shutdown_date == dt.date(2999, 12, 31)
        assert base_model.config == TINY_CONFIG
        assert changes() == [(None, {"fields": ["shutdown_date"]})]

    def test_sets_names_in_the_admin(self, operator: User, base_model: BaseModel) -> None:
        client = Client()
        client.force_login(operator)
        url = reverse("admin:adapters_basemodel_change", args=[base_model.pk])
        form = {"context_length": "128", "max_rank": "256", "is_active": "on"}
        for text, names in (('["org/tiny"]', ["org/tiny"]), ("", []), ("[]", [])):
            assert client.post(url, {**form, "known_names": text}).status_code == 302
            base_model.refresh_from_db()
            assert base_model.known_names == names
        for text in ("[1]", '"org/tiny"', "{", '["' + "x" * 201 + '"]'):
            assert client.post(url, {**form, "known_names": text}).status_code == 200

    def test_a_new_config_keeps_it(self, base_model: BaseModel) -> None:
        ends_on(dt.date(2999, 12, 31))
        services.base_model_add(name="tiny", revision="1" * 64, config=TINY_CONFIG)
        base_model.refresh_from_db()
        assert base_model.shutdown_date == dt.date(2999, 12, 31)


class TestBefore:
    def test_everybody_is_told(self, adapter: Adapter, acme: Party) -> None:
        ends_on(today() + DAY)
        day = str(today() + DAY)
        listed = {
            model.name: ServedModelSerializer(model).data for model in resolution.models_list()
        }
        assert {name: body["shutdown_date"] for name, body in listed.items()} == {
            "invoices": day,
            "tiny": day,
        }
        client = as_key(acme)
        for path in ("base-models", "adapters"):
            (row,) = client.get(f"/api/v1/{path}").json()["data"]
            assert row["shutdown_date"] == day
        for path in ("", "adapters", "adapters/invoices", "adapters/invoices/versions/1"):
            page = browser_of(acme.viewer).get(f"/console/{path}").content.decode()
            assert f"retires on {day}" in page, path

    def test_it_answers_to_the_last_day(self, adapter: Adapter, acme: Party) -> None:
        ends_on(today() + DAY)
        principal = auth.authenticate(acme.header)
        for name in NAMES:
            caller = access.resolve_now(principal, ModelSelector.model(name))
            assert caller.model.base_model.name == "tiny"


class TestThen:
    @pytest.fixture(autouse=True)
    def over(self, adapter: Adapter) -> None:
        ends_on(today())

    @pytest.mark.parametrize("name", NAMES)
    def test_every_name_is_refused_with_the_day(self, acme: Party, name: str) -> None:
        with pytest.raises(NotFound) as caught:
            access.resolve_now(auth.authenticate(acme.header), ModelSelector.model(name))
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        assert f"The model `{name}` was shut down on {today()}" in caught.value.message

    def test_a_blend_names_the_field(self, acme: Party) -> None:
        selector = ModelSelector(
            label="blend", names=("invoices",), weights=(1.0,), params=("adapters.0.name",)
        )
        with pytest.raises(NotFound) as caught:
            access.resolve_now(auth.authenticate(acme.header), selector)
        assert caught.value.param == "adapters.0.name"

    async def test_also_what_is_in_memory(self, acme: Party, monkeypatch: Any) -> None:
        """A model that was looked up a moment before the day began."""
        principal = auth.Principal(tenant=acme.tenant, role=auth.Role.OWNER, api_key=acme.api_key)
        base_model = BaseModel(name="tiny", shutdown_date=today() + DAY)
        found = resolution.ResolvedModel(
            name="tiny", base_model=base_model, version=None, created=0
        )
        known = access._Known(found, NO_LIMITS)
        access._names_known.put((acme.api_key.id, "tiny"), known, epochs.stamp())
        caller = await access.resolve(principal, ModelSelector.model("tiny"))
        assert caller.model.name == "tiny"
        base_model.shutdown_date = today()
        with pytest.raises(NotFound):
            await access.resolve(principal, ModelSelector.model("tiny"))

    def test_a_stranger_learns_nothing(self, globex: Party) -> None:
        principal = auth.authenticate(globex.header)
        messages = []
        for name in ("invoices", "nothing!"):
            with pytest.raises(NotFound) as caught:
                access.resolve_now(principal, ModelSelector.model(name))
            messages.append(caught.value.message.replace(name, "x"))
        assert messages[0] == messages[1]

    def test_a_batchs_lines_are_faults(self, acme: Party) -> None:
        line = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "invoices", "prompt": "x"},
        }
        found = validate(
            [json.dumps(line).encode()],
            endpoint="/v1/completions",
            principal=auth.authenticate(acme.header),
            keep=lambda refusals: None,
        )
        (fault,) = found.faults
        assert (fault["code"], fault["param"]) == ("model_not_found", "body.model")
        assert str(today()) in fault["message"]

    def test_nobody_can_choose_it(self, acme: Party) -> None:
        assert resolution.models_list() == []
        assert as_key(acme).get("/api/v1/base-models").json()["data"] == []
        with pytest.raises(InvalidRequest):
            services.adapter_create(name="new", base_model_name="tiny")
        page = browser_of(acme.viewer).get("/console/adapters/invoices").content.decode()
        assert f"retired on {today()}" in page

    def test_its_adapters_can_still_be_deleted(self, adapter: Adapter) -> None:
        services.model_delete("invoices")
        adapter.refresh_from_db()
        assert adapter.live_version is None

    def test_the_operator_can_take_it_back(self, acme: Party) -> None:
        ends_on(None)
        assert access.resolve_now(
            auth.authenticate(acme.header), ModelSelector.model("invoices")
        ).model.parts
