# ruff: noqa: F811  (fixtures)
"""The operator's pages: across tenants, for operators alone, without secrets."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
import redis
from allauth.mfa.models import Authenticator
from allauth.mfa.totp.internal.auth import (
    SECRET_SESSION_KEY,
    TOTP,
    format_hotp_value,
    generate_totp_secret,
    hotp_value,
)
from django.conf import settings
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from contract.messages import protocol
from contract.messages.protocol import Heartbeat
from controlplane.adapters.models import BaseModel
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import services
from controlplane.tenants.models import ApiKey, Membership, Tenant, User
from tests.controlplane.conftest import PASSWORD, TINY_CONFIG, Party, assert_error, make_operator
from tests.controlplane.console.conftest import Belongings, belongings  # noqa: F401

LISTS = [
    "tenants_tenant",
    "tenants_user",
    "tenants_membership",
    "tenants_apikey",
    "adapters_basemodel",
    "adapters_adapter",
    "adapters_adapterversion",
    "training_dataset",
    "training_trainingrun",
    "training_schedule",
    "inference_inferencerequest",
    "usage_usagerecord",
    "deletion_tenantdeletion",
]


@pytest.fixture
def operator(db: None) -> Client:
    user = make_operator("operator@example.com")
    client = Client()
    client.force_login(user)
    return client


@pytest.mark.parametrize("name", LISTS)
def test_operator_sees_every_list(name: str, operator: Client, belongings: Belongings) -> None:
    assert operator.get(reverse(f"admin:{name}_changelist")).status_code == 200


class Names(HTMLParser):
    """What a page says of itself and of its fields, for who cannot see it."""

    def __init__(self) -> None:
        super().__init__()
        self.title = ""
        self.labelled: set[str | None] = set()
        self.fields: list[dict[str, str | None]] = []
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("title", "label"):
            self._inside.append(tag)
        if tag == "label":
            self.labelled.add(found.get("for"))
        is_hidden = found.get("type") in ("hidden", "submit")
        if tag in ("select", "textarea", "input") and not is_hidden and "label" not in self._inside:
            self.fields.append({"tag": tag, **found})

    def handle_endtag(self, tag: str) -> None:
        if self._inside[-1:] == [tag]:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        self.title += data if self._inside[-1:] == ["title"] else ""

    @property
    def nameless(self) -> list[dict[str, str | None]]:
        named = ("aria-label", "aria-labelledby", "title", "placeholder")
        return [
            field
            for field in self.fields
            if field.get("id") not in self.labelled and not any(field.get(name) for name in named)
        ]


def test_every_page_and_field_has_a_name(
    operator: Client, acme: Party, belongings: Belongings
) -> None:
    with tenant_scope(acme.tenant.id):
        member = Membership.objects.first()
        assert member is not None
    pages = [reverse(f"admin:{name}_changelist") for name in LISTS]
    pages += [reverse(f"admin:{name}") for name in ("index", "workers")]
    for model, row in (
        *(("tenant", acme.tenant), ("user", acme.owner), ("membership", member)),
        ("apikey", acme.api_key),
    ):
        pages.append(reverse(f"admin:tenants_{model}_change", args=[row.pk]))
        if model != "apikey":
            pages.append(reverse(f"admin:tenants_{model}_add"))
    for page in pages:
        answer = operator.get(page)
        assert answer.status_code == 200, page
        found = Names()
        found.feed(answer.content.decode())
        assert len(found.title.strip()) > 5, page
        assert found.nameless == [], page


def test_rows_are_titled_by_names_and_numbers_are_rounded(
    operator: Client, acme: Party, belongings: Belongings
) -> None:
    with tenant_scope(acme.tenant.id):
        member = Membership.objects.select_related("user", "tenant").first()
        run = belongings.run
        run.progress = {"loss": 1.23456789, "losses": [[1, 2.3456789]]}
        run.save()
        request = InferenceRequest.objects.create(
            request_id="req_1",
            model="invoices",
            base_model="tiny",
            worker_id="gpu-1",
            finish_reason="stop",
            accepted_at=timezone.now(),
            total_ms=2065.87815284729,
        )
    assert member is not None
    for name, pk, title in (
        ("tenants_membership", member.pk, f"{member.user.email} in acme"),
        ("adapters_adapterversion", belongings.ready.pk, "invoices@1"),
        ("training_trainingrun", run.pk, f"invoices, {run.created_at:%Y-%m-%d %H:%M}"),
        ("inference_inferencerequest", request.pk, "req_1"),
    ):
        page = operator.get(reverse(f"admin:{name}_change", args=[pk])).content.decode()
        found = Names()
        found.feed(page)
        assert title in found.title
        assert re.findall(r"\d\.\d{5,}", page) == [], name
        rows = operator.get(reverse(f"admin:{name}_changelist")).content.decode()
        assert str(pk) not in re.sub(r"<[^>]*>", "", rows), name
        assert re.findall(r">[\d,]+\.\d{5,}", rows) == [], name


@pytest.mark.parametrize("page", ["index", "workers", "tenants_tenant_changelist"])
def test_tenants_people_are_kept_out(page: str, acme: Party) -> None:
    client = Client()
    client.force_login(acme.owner)
    answer = client.get(reverse(f"admin:{page}"), follow=True)
    assert answer.status_code == 403
    assert b"For operators" in answer.content


def test_operator_signs_in_where_everybody_does(db: None) -> None:
    services.user_create(
        email="operator@example.com", password=PASSWORD, is_operator=True, is_proven=True
    )
    client = Client()
    sign_in = client.get(reverse("admin:workers"), follow=True)
    assert sign_in.redirect_chain[-1][0].startswith("/console/sign-in?next=")
    form = {"login": "operator@example.com", "password": PASSWORD, "next": "/admin/workers/"}
    answer = client.post("/console/sign-in", form)
    assert (answer.status_code, answer.url) == (302, "/admin/workers/")


def test_an_operator_sets_up_a_second_factor_before_anything_else(db: None) -> None:
    email = "operator@example.com"
    services.user_create(email=email, password=PASSWORD, is_operator=True, is_proven=True)
    client, form = Client(), {"login": email, "password": PASSWORD, "next": "/admin/"}
    client.post("/console/sign-in", form)
    for page in ("index", "workers", "tenants_user_changelist"):
        answer = client.get(reverse(f"admin:{page}"), follow=True)
        assert answer.redirect_chain[-1] == ("/console/security", 302)
        assert b"Operators need a second factor" in answer.content
    assert_error(client.get("/ops/v1/tenants"), 403)
    made = client.post("/ops/v1/tenants", {"slug": "x", "name": "X"}, "application/json")
    assert assert_error(made, 403)["code"] == "second_factor_required"
    assert not Tenant.objects.exists()

    url = "/console/account/2fa/totp/activate/"
    client.post("/console/account/reauthenticate/", {"password": PASSWORD})
    client.get(url)
    code = hotp_value(client.session[SECRET_SESSION_KEY], int(time.time()) // 30)
    assert client.post(url, {"code": format_hotp_value(code)}).status_code == 302
    assert client.get("/admin/").status_code == 200
    assert client.get("/ops/v1/tenants").status_code == 200

    by_password = Client()
    answer = by_password.post("/console/sign-in", form)
    assert "/2fa/authenticate/" in answer.url
    assert by_password.get("/admin/").status_code == 302
    assert_error(by_password.get("/ops/v1/tenants"), 401)


def test_a_laptop_may_do_without_the_second_factor(db: None, settings: Any) -> None:
    settings.OPERATORS_NEED_SECOND_FACTOR = False
    user = services.user_create(email="op@example.com", password=PASSWORD, is_operator=True)
    client = Client()
    client.force_login(user)
    assert client.get("/admin/").status_code == 200
    assert client.get("/ops/v1/tenants").status_code == 200


def test_makes_a_tenant_with_an_owner(operator: Client, acme: Party) -> None:
    answer = operator.post(
        reverse("admin:tenants_tenant_add"),
        {
            "slug": "initech",
            "name": "Initech",
            "status": "active",
            "-1-TOTAL_FORMS": "1",
            "-1-INITIAL_FORMS": "0",
            "-1-0-user": str(acme.owner.pk),
            "-1-0-role": "owner",
        },
    )
    assert answer.status_code == 302, answer.context["errors"]
    tenant = Tenant.objects.get(slug="initech")
    with tenant_scope(tenant.id):
        assert Membership.objects.get().user == acme.owner


def test_suspends_and_reactivates_a_tenant(operator: Client, acme: Party) -> None:
    url = reverse("admin:tenants_tenant_changelist")
    for action, status in (("suspend", "suspended"), ("reactivate", "active")):
        operator.post(url, {"action": action, "_selected_action": [str(acme.tenant.pk)]})
        acme.tenant.refresh_from_db()
        assert acme.tenant.status == status


def test_makes_a_person_who_can_sign_in(operator: Client) -> None:
    answer = operator.post(
        reverse("admin:tenants_user_add"),
        {
            "email": "New@Person.example",
            "usable_password": "true",
            "password1": PASSWORD,
            "password2": PASSWORD,
        },
    )
    assert answer.status_code == 302, answer.context["errors"]
    assert User.objects.get(email="new@person.example").check_password(PASSWORD)


def test_removes_the_second_factors_of_who_lost_them(operator: Client, acme: Party) -> None:
    TOTP.activate(acme.viewer, generate_totp_secret())
    TOTP.activate(acme.owner, generate_totp_secret())
    form = {"action": "remove_second_factors", "_selected_action": [str(acme.viewer.pk)]}
    operator.post(reverse("admin:tenants_user_changelist"), form)
    left = Authenticator.objects.exclude(user__is_staff=True)
    assert [row.user for row in left] == [acme.owner]


def test_nothing_of_allauths_has_a_page_here(operator: Client) -> None:
    page = operator.get(reverse("admin:index")).content.decode().lower()
    for word in ("authenticator", "social", "user sessions"):
        assert word not in page


def test_changes_a_person(operator: Client, acme: Party) -> None:
    url = reverse("admin:tenants_user_change", args=[acme.viewer.pk])
    form = {"email": acme.viewer.email, "first_name": "Vi", "last_name": ""}
    assert operator.post(url, form).status_code == 302
    acme.viewer.refresh_from_db()
    assert (acme.viewer.first_name, acme.viewer.is_active) == ("Vi", False)


def test_revokes_a_key_and_never_shows_its_secret(operator: Client, acme: Party) -> None:
    url = reverse("admin:tenants_apikey_changelist")
    operator.post(url, {"action": "revoke", "_selected_action": [str(acme.api_key.pk)]})
    with tenant_scope(acme.tenant.id):
        key = ApiKey.objects.get(pk=acme.api_key.pk)
    assert key.revoked_at is not None
    page = operator.get(reverse("admin:tenants_apikey_change", args=[key.pk])).content.decode()
    assert bytes(key.secret_hmac).hex() not in page
    assert "secret" not in page.lower()


@pytest.mark.parametrize("name", ["tenants_apikey", "adapters_adapterversion", "usage_usagerecord"])
def test_what_the_platform_writes_cannot_be_written_here(name: str, operator: Client) -> None:
    assert operator.get(reverse(f"admin:{name}_add")).status_code == 403


@pytest.mark.parametrize(
    ("config", "is_taken"),
    [(TINY_CONFIG, True), ({**TINY_CONFIG, "hidden_size": "wide"}, False), ([1], False)],
    ids=["good", "bad size", "list"],
)
def test_adds_a_base_model_with_sound_shapes(config: Any, is_taken: bool, operator: Client) -> None:
    form = {
        "name": "tiny",
        "revision": "0" * 64,
        "config": json.dumps(config),
        "context_length": "128",
        "max_rank": "256",
        "is_active": "on",
    }
    answer = operator.post(reverse("admin:adapters_basemodel_add"), form)
    assert (answer.status_code == 302) == is_taken
    assert BaseModel.objects.exists() == is_taken


def test_changes_a_base_model_but_not_its_shapes(operator: Client, base_model: BaseModel) -> None:
    url = reverse("admin:adapters_basemodel_change", args=[base_model.pk])
    form = {"context_length": "64", "max_rank": "128", "is_active": "on", "config": "{}"}
    assert operator.post(url, form).status_code == 302
    base_model.refresh_from_db()
    assert (base_model.context_length, base_model.config) == (64, TINY_CONFIG)


def test_version_page_shows_the_reasons(operator: Client, belongings: Belongings) -> None:
    url = reverse("admin:adapters_adapterversion_change", args=[belongings.rejected.pk])
    assert b"DoRA &lt;is&gt; not supported." in operator.get(url).content


@pytest.fixture
def beating() -> Iterator[Heartbeat]:
    """A worker's heartbeat in Redis."""
    beat = Heartbeat(
        worker_id="worker-7",
        boot_id="b",
        pool=settings.POOL,
        base_model="tiny",
        base_revision="0" * 64,
        device="cpu",
        running=3,
        max_running=16,
        free_pages=120,
        num_pages=200,
        resident_digests=("abcdef0123456789" * 4,) * 4,
        started_at=time.time(),
    )
    registry = protocol.workers_key(settings.POOL)
    row = protocol.worker_key(settings.POOL, beat.worker_id)
    with redis.Redis.from_url(settings.REDIS_URL) as client:
        client.hset(row, "m", beat.encode())
        client.zadd(registry, {beat.worker_id: time.time()})
        yield beat
        client.delete(row)
        client.zrem(registry, beat.worker_id)


def test_workers_page_is_live(operator: Client, beating: Heartbeat) -> None:
    page = operator.get(reverse("admin:workers")).content.decode()
    for shown in ("worker-7", "alive", "tiny", "3 / 16", "120 / 200", "4: abcdef01, "):
        assert shown in page


def test_workers_page_without_workers_says_how_to_start_one(operator: Client) -> None:
    assert b"python -m worker" in operator.get(reverse("admin:workers")).content


def test_a_tenant_is_deleted_after_its_slug_was_typed_and_restored(
    operator: Client, acme: Party
) -> None:
    page = reverse("admin:tenants_tenant_change", args=[acme.tenant.pk])
    link = reverse("admin:deletion_tenantdeletion_ask", args=[acme.tenant.pk])
    assert link in operator.get(page).content.decode()
    assert "Type acme to confirm" in operator.get(link).content.decode()
    assert operator.post(link, {"confirm": "acne"}).status_code == 409
    answer = operator.post(link, {"confirm": "acme"}, follow=True)
    assert "acme is suspended" in answer.content.decode()
    assert Tenant.objects.get(pk=acme.tenant.pk).status == "deleting"
    assert "Restore it" in operator.get(link).content.decode()
    assert "Being deleted" in operator.get(page).content.decode()
    operator.post(link, {"restore": "1"})
    assert Tenant.objects.get(pk=acme.tenant.pk).status == "active"
    assert Client().post(link, {"confirm": "acme"}).status_code == 302  # to sign in
    assert Tenant.objects.get(pk=acme.tenant.pk).status == "active"
