"""Operators' service keys: who makes them, what opens with them, and what does not."""

from __future__ import annotations

import datetime as dt
import io
import json
import re
import time
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.db.utils import ProgrammingError
from django.utils import timezone

from contract.process.log_secrets import masked
from controlplane.events.audit.models import AuditEvent
from controlplane.operator.service_keys import auth
from controlplane.operator.service_keys.models import ServiceKey
from controlplane.operator.service_keys.scopes import Scope
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants import keys, pepper_change, services
from controlplane.tenants.models import Tenant, User
from tests.controlplane.conftest import Party, as_user, assert_error, make_operator
from tests.controlplane.operator.service_keys import as_service_key, make_service_key, with_key
from tests.controlplane.operator.test_api import OPERATIONS, address

pytestmark = pytest.mark.django_db
URL = "/ops/v1/service-keys"


@pytest.fixture
def operator() -> User:
    return make_operator("ops@lorikeet.example")


def make(client: Any, **fields: Any) -> Any:
    body = {"name": "ci", "scopes": ["tenants:read"], **fields}
    return client.post(URL, body, format="json")


def trail() -> list[tuple[str, str, str]]:
    with all_tenants(reason="test"):
        events = AuditEvent.objects.filter(tenant=None).order_by("seq")
        return list(events.values_list("action", "actor_type", "actor_name"))


def let_expire(service_key: ServiceKey) -> None:
    with all_tenants(reason="test"):
        ServiceKey.objects.filter(pk=service_key.pk).update(
            expires_at=timezone.now() - dt.timedelta(seconds=1)
        )


class TestLife:
    def test_an_operator_makes_rotates_and_revokes_one(self, operator: User) -> None:
        person = as_user(operator)
        made = make(person)
        assert made.status_code == 201
        first, url = made.json()["key"], f"{URL}/{made.json()['public_id']}"
        assert first.startswith("lk_ops_")
        assert with_key(first).get("/ops/v1/tenants").status_code == 200
        for shown in (person.get(url).json(), person.get(URL).json()["data"][0]):
            assert "key" not in shown
            assert shown["last_used_at"] is not None
        second = person.post(f"{url}/rotate", {"grace_seconds": 60}, format="json").json()["key"]
        assert with_key(first).get("/ops/v1/tenants").status_code == 200
        third = person.post(f"{url}/rotate", {"grace_seconds": 0}, format="json").json()["key"]
        for gone in (first, second):
            assert_error(with_key(gone).get("/ops/v1/tenants"), 401)
        assert with_key(third).get("/ops/v1/tenants").status_code == 200
        assert person.post(f"{url}/revoke").json()["revoked_at"] is not None
        assert_error(with_key(third).get("/ops/v1/tenants"), 401)
        assert_error(person.post(f"{url}/rotate"), 409)
        actions = [action for action, *_ in trail()]
        assert actions[-4:] == [
            *("service_key.created", "service_key.rotated"),
            *("service_key.rotated", "service_key.revoked"),
        ]

    def test_it_expires(self) -> None:
        service_key, text = make_service_key()
        let_expire(service_key)
        assert_error(with_key(text).get("/ops/v1/tenants"), 401)

    def test_it_is_used_from_its_addresses_only(self) -> None:
        client = as_service_key(allowed_ips=["192.0.2.0/24"])
        refused = client.get("/ops/v1/tenants", REMOTE_ADDR="198.51.100.1")
        assert assert_error(refused, 403)["code"] == "address_not_allowed"
        assert client.get("/ops/v1/tenants", REMOTE_ADDR="192.0.2.9").status_code == 200

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"scopes": []}, "scopes"),
            ({"scopes": ["everything"]}, "scopes.0"),
            ({"name": " "}, "name"),
            ({"expires_at": "2001-01-01T00:00:00Z"}, "expires_at"),
            ({"allowed_ips": ["everywhere"]}, "allowed_ips"),
            ({"role": "owner"}, "role"),
        ],
    )
    def test_a_bad_field_is_named(self, operator: User, fields: Any, param: str) -> None:
        assert_error(make(as_user(operator), **fields), 400, param)
        with all_tenants(reason="test"):
            assert not ServiceKey.objects.exists()

    def test_a_wrong_secret_is_refused(self) -> None:
        service_key, _ = make_service_key()
        forged = keys.renewed(service_key.public_id, keys.OPERATORS).text()
        assert_error(with_key(forged).get("/ops/v1/tenants"), 401)
        assert_error(with_key("lk_ops_x").get("/ops/v1/tenants"), 401)

    def test_the_answer_can_be_read_again_with_the_same_idempotency_key(
        self, operator: User
    ) -> None:
        answers = [
            as_user(operator).post(
                URL,
                {"name": "ci", "scopes": ["pool:read"]},
                format="json",
                HTTP_IDEMPOTENCY_KEY="one",
            )
            for _ in range(2)
        ]
        assert answers[0].json()["key"] == answers[1].json()["key"]
        with all_tenants(reason="test"):
            assert ServiceKey.objects.count() == 1


class TestPeopleOnly:
    def test_no_service_key_makes_or_widens_one(self) -> None:
        service_key, text = make_service_key()
        client, url = with_key(text), f"{URL}/{service_key.public_id}"
        for answer in (
            make(client),
            client.get(URL),
            client.get(url),
            client.post(f"{url}/rotate"),
            client.post(f"{url}/revoke"),
        ):
            assert assert_error(answer, 403)["code"] == "operator_session_required"
        with all_tenants(reason="test"):
            assert ServiceKey.objects.count() == 1

    def test_an_operator_needs_the_second_factor(self) -> None:
        bare = services.user_create(
            email="bare@lorikeet.example", password="a long enough passphrase", is_operator=True
        )
        assert assert_error(make(as_user(bare)), 403)["code"] == "second_factor_required"

    def test_no_service_key_deletes_a_tenant_or_undoes_it(self, acme: Party) -> None:
        client, url = as_service_key(), "/ops/v1/tenants/acme"
        body = {"confirm": "acme", "grace_days": 0}
        for answer in (
            client.delete(url, body, format="json"),
            client.post(f"{url}/restore"),
            client.get("/ops/v1/deletions"),
        ):
            assert assert_error(answer, 403)["code"] == "operator_session_required"
        assert Tenant.objects.get().status == "active"


class TestScopes:
    #: By the start of the address: who may read there, and who may write.
    RULES = (
        # An alias and a revision have a system prompt; who reads tenants reads no prompts.
        *(
            (f"/ops/v1/tenants/{{slug}}/aliases/{{name}}{rest}", readers, {"adapters:write"})
            for rest, readers in (
                ("/revisions/{number}", {"adapters:write"}),
                ("/", {"tenants:read", "adapters:write"}),
                ("", {"adapters:write"}),
            )
        ),
        ("/ops/v1/tenants/{slug}/aliases", {"tenants:read", "adapters:write"}, {"adapters:write"}),
        ("/ops/v1/service-keys", set(), set()),
        ("/ops/v1/deletions", set(), set()),
        ("/ops/v1/tenants/{slug}/restore", set(), set()),
        ("/ops/v1/tenants/{slug}/keys", {"tenants:read", "keys:write"}, {"keys:write"}),
        (
            "/ops/v1/tenants/{slug}/adapters/{name}/schedule",
            {"tenants:read", "training:write"},
            {"training:write"},
        ),
        ("/ops/v1/tenants/{slug}/adapters", {"tenants:read", "adapters:write"}, {"adapters:write"}),
        ("/ops/v1/tenants/{slug}/datasets", {"tenants:read", "datasets:write"}, {"datasets:write"}),
        (
            "/ops/v1/tenants/{slug}/training-runs",
            {"tenants:read", "training:write"},
            {"training:write"},
        ),
        ("/ops/v1/tenants", {"tenants:read"}, {"tenants:write"}),
        ("/ops/v1/base-models", {"pool:read", "tenants:read", "adapters:write"}, {"pool:write"}),
        ("/ops/v1/", {"pool:read"}, {"pool:write"}),
    )
    IMPLIED = {"tenants:write": "tenants:read", "pool:write": "pool:read"}

    @pytest.mark.parametrize("scope", list(Scope))
    def test_a_key_does_what_its_scope_allows_and_nothing_else(
        self, acme: Party, scope: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client, has = as_service_key(scope), {scope, self.IMPLIED.get(scope, scope)}
        for method, path in OPERATIONS:
            rule = next(rule for rule in self.RULES if path.startswith(rule[0]))
            wanted = rule[1] if method == "get" else rule[2]
            if (method, path) == ("delete", "/ops/v1/tenants/{slug}"):
                wanted = set()  # people only
            answer = getattr(client, method)(address(path, slug="acme"), format="json")
            is_in = bool(has & wanted)
            # A body is missing and nothing has the other names: whoever is let in gets another
            # error, or a list.
            assert (answer.status_code != 403) is is_in, (method, path, answer.content)
            if not is_in:
                code = "insufficient_scope" if wanted else "operator_session_required"
                assert answer.json()["error"]["code"] == code
        with all_tenants(reason="test"):
            assert Tenant.objects.get().name == acme.tenant.name

    def test_a_key_needs_no_csrf_token_and_no_session(self) -> None:
        client = as_service_key("tenants:write")
        body = {"slug": "initech", "name": "Initech"}
        assert client.post("/ops/v1/tenants", body, format="json").status_code == 201
        assert trail()[-1] == ("tenant.acted_for", "service_key", "script")
        with all_tenants(reason="test"):
            event = AuditEvent.objects.get(action="tenant.created")
        assert (event.tenant.slug, event.actor_type) == ("initech", "service_key")

    def test_a_session_beside_a_bad_key_does_not_help(self, operator: User) -> None:
        client = as_user(operator)
        client.credentials(HTTP_AUTHORIZATION="Bearer lk_ops_nonsense")
        assert_error(client.get("/ops/v1/tenants"), 401)


class TestElsewhere:
    def test_tenants_addresses_refuse_it(self, acme: Party) -> None:
        _, text = make_service_key()
        for url in ("/api/v1/keys", "/v1/models", "/v1/files"):
            error = assert_error(with_key(text).get(url), 401)
            assert error["code"] == "wrong_key_kind"

    def test_no_tenants_scope_sees_or_makes_one(self, acme: Party) -> None:
        service_key, _ = make_service_key()
        with tenant_scope(acme.tenant.id):
            assert not ServiceKey.objects.exists()
            assert not ServiceKey.objects.update(scopes=["pool:write"])
            with pytest.raises(ProgrammingError, match="row-level security"), transaction.atomic():
                ServiceKey(public_id="x", name="x", secret_hmac=b"", last4="", scopes=[]).save()
        assert not ServiceKey.objects.exists()
        with all_tenants(reason="test"):
            assert ServiceKey.objects.get() == service_key
        with connection.cursor() as cursor:
            cursor.execute("select count(*) from service_keys_servicekey")
            assert cursor.fetchone() == (0,)

    def test_scanners_and_the_log_filter_know_its_form(self) -> None:
        _, text = make_service_key()
        assert re.findall(keys.KEY_REGEX, f"key={text};") == [text]
        assert text[8:] not in masked(f"sent {text}")


def test_requests_of_one_key_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "MAX_PER_MINUTE", 3)
    now = (time.time() // 60 + 1) * 60 + 15
    monkeypatch.setattr(auth.time, "time", lambda: now)
    client, other = as_service_key("tenants:read"), as_service_key("tenants:read")
    answers = [client.get("/ops/v1/tenants") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert answers[3].headers["Retry-After"] == "45"
    assert other.get("/ops/v1/tenants").status_code == 200
    now += 60
    assert client.get("/ops/v1/tenants").status_code == 200


class TestCommand:
    def run(self, *arguments: str) -> Any:
        out = io.StringIO()
        call_command("operator_key_create", "--name", "ci", *arguments, stdout=out)
        return json.loads(out.getvalue())

    def test_it_makes_a_key_once(self) -> None:
        arguments = ("--scope", "tenants:write", "--scope", "keys:write")
        first, second = self.run(*arguments), self.run(*arguments)
        assert (first["created"], second["created"]) == (True, False)
        assert "key" not in second
        assert with_key(first["key"]).get("/ops/v1/tenants").status_code == 200
        third = self.run(*arguments, "--rotate")
        assert third["public_id"] == first["public_id"]
        assert with_key(third["key"]).get("/ops/v1/tenants").status_code == 200

    @pytest.mark.parametrize(
        "arguments",
        [("--scope", "nothing"), ("--scope", "pool:read", "--expires-days", "0")],
    )
    def test_it_refuses_a_bad_argument(self, arguments: tuple[str, ...]) -> None:
        with pytest.raises(CommandError):
            self.run(*arguments)

    def test_it_does_not_hide_that_the_key_has_other_scopes(self) -> None:
        self.run("--scope", "tenants:read")
        with pytest.raises(CommandError, match="tenants:read"):
            self.run("--scope", "pool:write")


def test_a_key_moves_to_a_new_pepper_when_it_is_used(settings: Any) -> None:
    used, unused = make_service_key(), make_service_key()
    settings.ACCEPTED_PEPPERS = [settings.API_KEY_PEPPER]
    settings.API_KEY_PEPPER = "a new pepper of sixty-four digits"
    assert pepper_change.key_counts(ServiceKey).accepted == 2
    assert with_key(used[1]).get("/ops/v1/tenants").status_code == 200
    counts = pepper_change.key_counts(ServiceKey)
    assert (counts.current, counts.accepted) == (1, 1)
    settings.ACCEPTED_PEPPERS = []
    assert with_key(used[1]).get("/ops/v1/tenants").status_code == 200
    assert with_key(unused[1]).get("/ops/v1/tenants").status_code == 401
