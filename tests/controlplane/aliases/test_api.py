"""/api/v1/aliases: addresses, who may use them, bad bodies, and the commands of the docs."""

from __future__ import annotations

import shlex
from typing import Any
from urllib.parse import urlsplit

import pytest

from controlplane.adapters.models import Adapter
from controlplane.aliases import services
from controlplane.aliases.contents import Contents
from controlplane.aliases.models import Alias, AliasPart, AliasRevision
from controlplane.aliases.resolution import models_list
from controlplane.events.audit.models import AuditEvent
from controlplane.gateway.models import ModelListSerializer
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants import services as tenants
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.models import Role, ServiceAccount
from tests.conftest import ROOT
from tests.controlplane.aliases.conftest import parts
from tests.controlplane.conftest import Party, as_key, as_user, assert_error

ALIASES = "/api/v1/aliases"
PROD = f"{ALIASES}/prod"
SCHEMA = {
    "type": "object",
    "properties": {"total": {"type": "number"}, "iban": {"type": "string"}},
    "required": ["total", "iban"],
    "additionalProperties": False,
}


def call(client: Any, method: str, path: str, body: Any = None) -> Any:
    return getattr(client, method)(path, body, format="json")


def test_the_life_of_an_alias(acme: Party, adapter: Adapter, letters: Adapter) -> None:
    client = as_key(acme)
    body = {
        "name": "prod",
        "primary": {"adapter": "invoices"},
        "canary": [{"adapter": "invoices", "version": 2}, {"adapter": "letters", "weight": 0.5}],
        "canary_percent": 1,
        "json_schema": SCHEMA,
        "system_prompt": "Read the invoice.\n",
        "sampling": {"temperature": 0, "stop": "END"},
        "warmth": "warm",
        "reason": "for the portal",
    }
    made = call(client, "post", ALIASES, body)
    assert made.status_code == 201, made.content
    said = made.json()
    assert said["primary"] == [{"adapter": "invoices", "version": None, "weight": 1.0}]
    assert said["canary"] == [
        {"adapter": "invoices", "version": 2, "weight": 1.0},
        {"adapter": "letters", "version": None, "weight": 0.5},
    ]
    assert list(said["json_schema"]["properties"]) == ["total", "iban"], "their order stays"
    assert said["sampling"] == {"temperature": 0, "stop": ["END"]}
    assert (said["object"], said["revision"], said["base_model"]) == ("alias", 1, "tiny")
    assert said["system_prompt"] == "Read the invoice.\n"
    assert call(client, "post", f"{PROD}/ramp", {"percent": 50}).json()["revision"] == 2
    changed = call(client, "patch", PROD, {"canary": None, "if_revision": 2}).json()
    assert (changed["canary"], changed["canary_percent"], changed["warmth"]) == ([], 0, "warm")
    error = assert_error(call(client, "post", f"{PROD}/promote-canary", {}), 409)
    assert error["code"] == "no_canary"
    back = call(client, "post", f"{PROD}/rollback", {"reason": "again"}).json()
    assert (back["revision"], back["canary_percent"]) == (4, 50)
    first = call(client, "post", f"{PROD}/rollback", {"revision": 1}).json()
    assert (first["revision"], first["canary_percent"]) == (5, 1)
    promoted = call(client, "post", f"{PROD}/promote-canary", {"if_revision": 5}).json()
    assert (promoted["primary"], promoted["canary"]) == (said["canary"], [])
    rows = client.get(f"{PROD}/revisions").json()["data"]
    assert [(row["revision"], row["cause"], row["copied_from"]) for row in rows] == [
        (6, "canary_promoted", None),
        (5, "rolled_back", 1),
        (4, "rolled_back", 2),
        (3, "changed", None),
        (2, "ramped", None),
        (1, "created", None),
    ]
    assert [row["is_current"] for row in rows] == [True] + [False] * 5
    assert rows[-1]["reason"] == "for the portal" and rows[0]["actor_type"] == "api_key"
    assert "json_schema" not in rows[0], "lists leave long texts out"
    assert client.get(f"{PROD}/revisions/1").json()["json_schema"] == SCHEMA
    assert_error(client.get(f"{PROD}/revisions/{2**40}"), 404)
    listed = client.get(ALIASES).json()["data"]
    assert [(row["name"], row["revision"]) for row in listed] == [("prod", 6)]
    assert promoted.pop("prefetched") is not None, "the workers were asked for version 2"
    assert client.get(PROD).json() == promoted
    assert client.delete(PROD).status_code == 204
    assert_error(client.get(PROD), 404)
    assert not AliasRevision.objects.exists() and not AliasPart.objects.exists()
    actions = AuditEvent.objects.filter(resource_type="alias").order_by("seq")
    assert [event.action for event in actions] == (
        ["alias.created"] + ["alias.revised"] * 5 + ["alias.deleted"]
    )


def test_a_schema_must_not_break_callers(acme: Party, adapter: Adapter, alias: Alias) -> None:
    client = as_key(acme)
    assert call(client, "patch", PROD, {"json_schema": SCHEMA}).status_code == 200
    without = {**SCHEMA, "required": ["total"]}
    error = assert_error(call(client, "patch", PROD, {"json_schema": without}), 409, "json_schema")
    assert error["code"] == "breaking_schema"
    assert "/required/iban is no longer required" in error["message"]
    error = assert_error(call(client, "patch", PROD, {"json_schema": None}), 409, "json_schema")
    assert "there is no schema any more" in error["message"]
    forced = call(client, "patch", PROD, {"json_schema": without, "force": True})
    assert forced.json()["revision"] == 3
    assert call(client, "post", f"{PROD}/rollback", {}).json()["json_schema"] == SCHEMA


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"primary": []}, "primary"),
        ({"primary": None}, "primary"),
        ({"primary": "invoices"}, "primary"),
        ({"primary": {"adapter": "invoices", "number": 1}}, "primary"),
        ({"primary": {"adapter": "invoices", "version": True}}, "primary"),
        ({"primary": {"adapter": "invoices", "version": -1}}, "primary"),
        ({"primary": {"adapter": "invoices", "weight": "1"}}, "primary"),
        ({"primary": {"adapter": {"adapter": "invoices"}}}, "primary"),
        ({"primary": [{"adapter": "invoices"}] * 1000}, "primary"),
        ({"primary": {"adapter": "invoices@1"}}, "primary"),
        ({"primary": {"adapter": "globex-own"}}, "primary"),
        ({"primary": {"adapter": "prod"}}, "primary"),
        ({"canary_percent": 10.5}, "canary_percent"),
        ({"canary_percent": 2**80}, "canary_percent"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"sampling": {"stop": [["a"]]}}, "sampling.stop"),
        ({"sampling": []}, "sampling"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "json_schema"),
        ({"json_schema": {"description": "x" * 70_000}}, "json_schema"),
        ({"json_schema": []}, "json_schema"),
        ({"system_prompt": "x" * 20_000}, "system_prompt"),
        ({"warmth": "lukewarm"}, "warmth"),
        ({"reason": "x" * 501}, "reason"),
        ({"if_revision": "last"}, "if_revision"),
        ({"targets": []}, "targets"),
    ],
)
def test_bad_bodies(acme: Party, alias: Alias, body: dict[str, Any], param: str) -> None:
    error = assert_error(call(as_key(acme), "patch", PROD, body), 400, param)
    assert error["type"] == "invalid_request_error"
    alias.refresh_from_db()
    assert alias.revision_number == 1


def test_bodies_are_bounded(acme: Party, alias: Alias) -> None:
    client = as_key(acme)
    huge = {"system_prompt": "x" * 300_000}
    assert call(client, "patch", PROD, huge).status_code == 413
    nested: Any = {}
    for _ in range(5000):
        nested = {"properties": {"a": nested}}
    text = '{"json_schema": ' + '{"not":' * 20_000 + "{}" + "}" * 20_000 + "}"
    answer = client.generic("PATCH", PROD, text, content_type="application/json")
    assert answer.status_code == 400


def test_who_may(acme: Party, globex: Party, alias: Alias) -> None:
    calls: list[tuple[str, str, Any]] = [
        ("patch", PROD, {"warmth": "warm"}),
        ("post", f"{PROD}/ramp", {"percent": 100}),
        ("post", f"{PROD}/rollback", {}),
        ("post", f"{PROD}/promote-canary", {}),
        ("delete", PROD, None),
    ]
    for method, path, body in calls:
        assert call(as_key(globex), method, path, body).status_code == 404, path
        assert call(as_user(acme.viewer), method, path, body).status_code == 403, path
    for path in (PROD, f"{PROD}/revisions", f"{PROD}/revisions/1"):
        assert as_key(globex).get(path).status_code == 404
        assert as_user(acme.viewer).get(path).status_code == 200
    assert as_key(globex).get(ALIASES).json()["data"] == []
    body = {"name": "prod", "primary": {"adapter": "invoices"}}
    assert_error(call(as_key(globex), "post", ALIASES, body), 400, "primary")
    assert call(as_user(acme.viewer), "post", ALIASES, body).status_code == 403
    with all_tenants(reason="a test"):
        assert Alias.objects.get().revision_number == 1


def test_a_key_publishes_only_what_it_may_name(acme: Party, alias: Alias, letters: Adapter) -> None:
    """Else it would reach other adapters by an alias."""
    account = ServiceAccount.objects.create(name="publisher", role=Role.OWNER)
    rules = KeyRules(scopes=("adapters:write", "read"), allowed_models=("prod", "invoices"))
    _, text = tenants.api_key_create(name="narrow", rules=rules, owner=account)
    client = as_key(acme)
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    for field in ("primary", "canary"):
        error = assert_error(
            call(client, "patch", PROD, {field: {"adapter": "letters"}}), 403, field
        )
        assert error["code"] == "model_not_allowed"
    body = {"name": "other", "primary": {"adapter": "invoices"}}
    assert_error(call(client, "post", ALIASES, body), 403, "name")
    assert call(client, "patch", PROD, {"canary": {"adapter": "invoices"}}).status_code == 200


def test_models_of_the_gateway(acme: Party, alias: Alias, letters: Adapter) -> None:
    """What `ModelsView` writes; the live tests ask it over HTTP."""
    changes = {"primary": parts("invoices", "letters")}
    services.alias_create(name="sum", contents=Contents(**changes))
    listed = ModelListSerializer({"data": models_list()}).data["data"]
    assert [model["id"] for model in listed] == ["tiny", "invoices", "letters", "prod", "sum"]
    base, *_, one, blend = listed
    assert (one["version"], one["parent"], one["owned_by"]) == (1, "tiny", "tenant")
    assert (blend["version"], blend["parent"], blend["owned_by"]) == (None, "tiny", "tenant")
    assert (base["parent"], base["owned_by"]) == (None, "lorikeet")
    assert_error(as_key(acme).delete("/api/v1/adapters/invoices"), 409)


def test_a_forced_deletion_takes_the_adapter_out(
    acme: Party, adapter: Adapter, letters: Adapter, alias: Alias
) -> None:
    client = as_user(acme.owner)
    for name, primary, canary in (("own", "letters", None), ("mixed", "invoices", "letters")):
        body: dict[str, Any] = {"name": name, "primary": {"adapter": primary}}
        if canary:
            body |= {"canary": {"adapter": canary}, "canary_percent": 5}
        assert call(client, "post", ALIASES, body).status_code == 201
    error = assert_error(client.delete("/api/v1/adapters/letters"), 409)
    assert error["code"] == "in_use"
    assert "the alias mixed, the alias own" in error["message"]
    assert client.delete("/api/v1/adapters/letters?force=true").status_code == 204
    assert sorted(Alias.objects.values_list("name", flat=True)) == ["mixed", "prod"]
    mixed = client.get(f"{ALIASES}/mixed").json()
    assert (mixed["revision"], mixed["canary"]) == (2, [])
    error = assert_error(call(client, "post", f"{ALIASES}/mixed/rollback", {}), 409)
    assert error["code"] == "target_deleted"
    assert not Adapter.objects.filter(name="letters").exists()


def test_a_repeated_attempt_changes_once(acme: Party, alias: Alias) -> None:
    client = as_key(acme)
    for _ in range(2):
        answer = client.post(
            f"{PROD}/ramp", {"percent": 70}, format="json", HTTP_IDEMPOTENCY_KEY="one"
        )
        assert answer.json()["revision"] == 2


def test_the_commands_of_the_documentation(acme: Party, adapter: Adapter) -> None:
    text = (ROOT / "docs" / "adapters.md").read_text().partition("## Aliases")[2]
    lines = text.split("```sh\n")[1].split("```")[0].strip().replace("\\\n", " ").splitlines()
    for line in lines[1:]:
        words = shlex.split(line.replace("$api", "http://host/api/v1/aliases"))
        given = {words[i]: words[i + 1] for i in range(1, len(words)) if words[i] in ("-X", "-d")}
        [url] = [word for word in words if word.startswith("http")]
        answer = as_key(acme).generic(
            given.get("-X", "POST" if "-d" in given else "GET"),
            urlsplit(url).path,
            given.get("-d", ""),
            content_type="application/json",
        )
        assert answer.status_code in (200, 201, 204), (line, answer.content)
    causes = AuditEvent.objects.filter(action="alias.revised").order_by("seq")
    assert [event.after["cause"] for event in causes if event.after] == [
        *("changed", "ramped", "canary_promoted", "rolled_back")
    ]
