"""Make, change and use webhooks: over the API and on the console's pages."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from cryptography.fernet import Fernet
from django.db import connection
from django.test import Client

from controlplane.events.audit.models import AuditEvent
from controlplane.infra.outbound import outbound
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import Membership
from controlplane.tenants.services import api_key_create
from controlplane.webhooks import services, signing
from controlplane.webhooks.models import WebhookEndpoint
from tests.conftest import ROOT
from tests.controlplane.conftest import Party, as_key, as_user, assert_error
from tests.controlplane.console.conftest import browser_of
from tests.controlplane.webhooks.conftest import Hook, happen, turn, url_of
from tests.receiver import Receiver, answer

API = "/api/v1/webhooks"


def create(client: Any, receiver: Receiver, **fields: Any) -> Any:
    body = {"url": url_of(receiver), "event_types": ["version.ready"], **fields}
    return client.post(API, body, format="json")


@pytest.mark.django_db(transaction=True)
def test_a_slow_name_server_holds_no_database_connection(
    acme: Party, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are few, and a tenant can name hosts whose name server never answers."""
    check, held = outbound.check, []

    def slow(url: str) -> Any:
        held.append(connection.connection is not None)
        return check(url)

    monkeypatch.setattr(outbound, "check", slow)
    assert create(as_user(acme.owner), receiver).status_code == 201
    assert held == [False]


class TestApi:
    def test_its_whole_life(self, acme: Party, receiver: Receiver) -> None:
        client = as_user(acme.owner)
        made = create(client, receiver, description="ours").json()
        secret = made.pop("secret")
        address = f"{API}/{made['id']}"
        assert secret.startswith("whsec_")
        assert client.get(address).json() == made
        assert client.get(API).json()["data"] == [made]
        changed = client.patch(address, {"is_enabled": False}, format="json").json()
        assert changed == {**made, "is_enabled": False}
        assert_error(client.post(f"{address}/test"), 409)
        client.patch(address, {"is_enabled": True}, format="json")
        tested = client.post(f"{address}/test")
        assert (tested.status_code, tested.json()["status"]) == (202, "pending")
        assert client.post(f"{address}/test").json()["id"] == tested.json()["id"]  # not two
        turn()
        assert len(receiver.received) == 1
        (row,) = client.get(f"{address}/deliveries").json()["data"]
        assert (row["event_type"], row["status"], row["response_status"]) == (
            *("webhook.test", "succeeded"),
            200,
        )
        again = client.post(f"{address}/deliveries/{row['id']}/redeliver")
        assert (again.status_code, again.json()["event"]) == (202, row["event"])
        turn()
        ids = {sent.headers["webhook-id"] for sent in receiver.received}
        assert (len(receiver.received), ids) == (2, {row["event"]})
        rotated = client.post(f"{address}/rotate", {"overlap_s": 60}, format="json").json()
        assert rotated["secret"] != secret and rotated["old_secret_until"]
        assert client.delete(address).status_code == 204
        assert_error(client.get(address), 404)
        with tenant_scope(acme.tenant.id):
            actions = [e.action.rpartition(".")[2] for e in AuditEvent.objects.order_by("seq")]
            trail = repr(list(AuditEvent.objects.values_list("before", "after")))
        assert actions[-6:] == [
            "created",
            "changed",
            "changed",
            "redelivered",
            "rotated",
            "deleted",
        ]
        assert secret not in trail and rotated["secret"] not in trail

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"url": "https://169.254.169.254/"}, "url"),
            ({"url": "http://example.com/"}, "url"),
            ({"url": "https://user@127.0.0.1/"}, "url"),
            ({"event_types": ["version.exploded"]}, "event_types"),
            ({"event_types": ["webhook.disabled"]}, "event_types"),
            ({"event_types": []}, "event_types"),
            ({"secret": "whsec_mine"}, "secret"),
        ],
    )
    def test_what_is_refused(
        self, acme: Party, receiver: Receiver, change: Any, param: str
    ) -> None:
        client = as_user(acme.owner)
        assert_error(create(client, receiver, **change), 400, param)
        made = create(client, receiver).json()
        answer = client.patch(f"{API}/{made['id']}", change, format="json")
        assert_error(answer, 400, param)

    def test_another_tenants_is_not_there(self, globex: Party, hook: Hook, acme: Party) -> None:
        happen(acme)
        turn()
        client, address = as_user(globex.owner), f"{API}/{hook.endpoint.pk}"
        (row,) = hook.deliveries()
        assert client.get(API).json()["data"] == []
        for given in (
            *(client.get(address), client.get(f"{address}/deliveries"), client.delete(address)),
            *(client.patch(address, {}, format="json"), client.post(f"{address}/test")),
            *(client.post(f"{address}/rotate"),),
            client.post(f"{address}/deliveries/{row.pk}/redeliver"),
        ):
            assert_error(given, 404)

    def test_who_may(self, acme: Party, receiver: Receiver) -> None:
        """Reading, too: an address may have a secret in it."""
        for client in (as_user(acme.viewer), as_key(acme)):  # with a key's default scopes
            assert client.get(API).status_code == create(client, receiver).status_code == 403
        with tenant_scope(acme.tenant.id):
            _, text = api_key_create(
                name="hooks",
                rules=KeyRules(scopes=("webhooks:manage",)),
                owner=Membership.objects.get(user=acme.owner),
            )
        client = as_key(acme)
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
        assert create(client, receiver).status_code == 201

    def test_their_number_is_bounded(
        self, acme: Party, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(services, "MAX_ENDPOINTS", 2)
        client = as_user(acme.owner)
        statuses = [create(client, receiver).status_code for _ in range(3)]
        assert statuses == [201, 201, 409]


def test_the_documented_command_makes_one(acme: Party, receiver: Receiver) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/webhooks.md").read_text(), re.S)
    words = shlex.split(block.replace("\\\n", " "))
    body = json.loads(words[words.index("-d") + 1])
    assert words[:4] == ["curl", "-X", "POST", "$LORIKEET_URL/api/v1/webhooks"]
    body["url"] = url_of(receiver)  # instead of example.com
    made = as_user(acme.owner).post(API, body, format="json")
    assert made.status_code == 201 and made.json()["secret"].startswith("whsec_")


def test_a_stored_secret_needs_the_pepper(acme: Party, hook: Hook, settings: Any) -> None:
    with all_tenants(reason="test"):
        (row,) = WebhookEndpoint.objects.values()
    assert hook.secret not in repr(
        {name: bytes(v) if name == "sealed_secret" else v for name, v in row.items()}
    )
    assert signing.unseal(row["sealed_secret"]) == hook.secret
    settings.API_KEY_PEPPER = Fernet.generate_key().decode()
    with pytest.raises(signing.Unreadable):
        signing.unseal(row["sealed_secret"])
    happen(acme)
    turn()  # and is not stopped by it
    assert "Its secret can no longer be read" in hook.refresh().disabled_reason
    assert hook.received == []


class TestPages:
    def test_from_the_form_to_a_second_delivery(self, acme: Party, receiver: Receiver) -> None:
        browser: Client = browser_of(acme.owner)
        assert b"No webhook yet" in browser.get("/console/webhooks").content
        form = {"url": url_of(receiver), "event_types": ["version.ready"], "description": ""}
        refused = browser.post("/console/webhooks/new", {**form, "url": "https://10.0.0.1/"})
        assert refused.status_code == 422 and b"no public address" in refused.content
        page = browser.post("/console/webhooks/new", form).content.decode()
        assert "whsec_" in page
        with tenant_scope(acme.tenant.id):
            endpoint = WebhookEndpoint.objects.get()
        address = f"/console/webhooks/{endpoint.pk}"
        receiver.behave = answer(500)
        happen(acme)
        turn()
        page = browser.get(address).content.decode()
        assert "whsec_" not in page and "500" in page and "Deliver again" in page
        assert "failing" in browser.get("/console/webhooks").content.decode()
        receiver.behave = answer(200)
        with tenant_scope(acme.tenant.id):
            (row,) = endpoint.deliveries.all()
        browser.post(f"{address}/deliveries/{row.pk}/redeliver")
        turn()
        assert "succeeded" in browser.get(address).content.decode()
        assert browser.post(address, {**form, "url": "ftp://x/"}).status_code == 422
        assert "whsec_" in browser.post(f"{address}/rotate").content.decode()
        browser.post(f"{address}/enable", {"is_enabled": "0"})
        assert "disabled" in browser.get("/console/webhooks").content.decode()
        browser.post(f"{address}/delete")
        assert b"No webhook yet" in browser.get("/console/webhooks").content

    def test_its_text_is_escaped(self, acme: Party, receiver: Receiver) -> None:
        with tenant_scope(acme.tenant.id):
            services.webhook_create(
                url=url_of(receiver, "/?a=<script>"),
                event_types=["version.ready"],
                description="<script>alert(1)</script>",
            )
        assert b"<script>a" not in browser_of(acme.owner).get("/console/webhooks").content
