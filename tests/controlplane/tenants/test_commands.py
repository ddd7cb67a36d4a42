"""The commands that operators, the demo and tests use."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane.adapters.models import BaseModel
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants import auth, key_services
from controlplane.tenants.models import ApiKey, Membership, Role, User
from tests.controlplane.conftest import PASSWORD, TINY_CONFIG, Party

pytestmark = pytest.mark.django_db


def run(name: str, *arguments: str) -> Any:
    out = io.StringIO()
    call_command(name, *arguments, stdout=out)
    return json.loads(out.getvalue())


def type_password(monkeypatch: pytest.MonkeyPatch, password: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(password + "\n"))


def test_tenant_create_finds_what_is_there() -> None:
    first = run("tenant_create", "--slug", "initech", "--name", "Initech")
    second = run("tenant_create", "--slug", "initech", "--name", "Initech")
    assert (first["created"], second["created"]) == (True, False)
    assert first["id"] == second["id"]


@pytest.mark.parametrize("slug", ["", "Acme", "a/b", "-a", "a:b", "x" * 64])
def test_tenant_create_refuses_a_bad_slug(slug: str) -> None:
    with pytest.raises(CommandError):
        run("tenant_create", "--slug", slug, "--name", "x")


def test_member_can_sign_in(acme: Party, monkeypatch: pytest.MonkeyPatch, client: Any) -> None:
    type_password(monkeypatch, PASSWORD)
    arguments = ("--tenant", "acme", "--email", "Dev@Acme.example", "--role", "developer")
    run("member_add", *arguments, "--password-stdin")
    assert client.login(username="dev@ACME.example", password=PASSWORD)
    with all_tenants(reason="test"):
        member = Membership.objects.get(user__email="dev@acme.example")
    assert (member.tenant, member.role) == (acme.tenant, Role.DEVELOPER)


def test_member_add_again_changes_role_and_password(
    acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_password(monkeypatch, "another long passphrase")
    arguments = ("--tenant", "acme", "--email", acme.viewer.email, "--role", "admin")
    run("member_add", *arguments, "--password-stdin")
    acme.viewer.refresh_from_db()
    assert acme.viewer.check_password("another long passphrase")
    with all_tenants(reason="test"):
        assert Membership.objects.get(user=acme.viewer).role == Role.ADMIN


def test_member_add_refuses_a_weak_password(acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    type_password(monkeypatch, "password")
    with pytest.raises(CommandError):
        run(
            *("member_add", "--tenant", "acme", "--email", "a@b.example", "--role", "viewer"),
            "--password-stdin",
        )
    assert not User.objects.filter(email="a@b.example").exists()


def test_key_from_the_command_opens(acme: Party) -> None:
    made = run("api_key_create", "--tenant", "acme", "--name", "demo")
    principal = auth.authenticate(f"Bearer {made['key']}")
    assert principal.tenant == acme.tenant
    assert principal.api_key is not None
    assert principal.api_key.public_id == made["public_id"]


def test_key_again_is_the_same_and_keeps_its_secret(acme: Party) -> None:
    arguments = ("api_key_create", "--tenant", "acme", "--name", " demo ")
    first, second = run(*arguments), run(*arguments)
    assert (first["created"], second["created"]) == (True, False)
    assert second["public_id"] == first["public_id"]
    assert "key" not in second
    assert auth.authenticate(f"Bearer {first['key']}").tenant == acme.tenant
    with tenant_scope(acme.tenant.id):
        assert ApiKey.objects.filter(name="demo").count() == 1


def test_key_rotated_has_another_secret(acme: Party) -> None:
    arguments = ("api_key_create", "--tenant", "acme", "--name", "demo", "--rotate")
    first, second = run(*arguments), run(*arguments)
    assert (first["created"], second["created"]) == (True, False)
    assert second["public_id"] == first["public_id"]
    assert second["key"] != first["key"]
    for text in (first["key"], second["key"]):  # the first for a day more
        assert auth.authenticate(f"Bearer {text}").tenant == acme.tenant


def test_key_again_is_new_when_the_first_is_over_or_anothers(acme: Party) -> None:
    arguments = ("api_key_create", "--tenant", "acme", "--name", "demo")
    with tenant_scope(acme.tenant.id):
        owner = Membership.objects.get(user=acme.owner)
        key_services.api_key_create(name="demo", owner=owner)
    first = run(*arguments)
    with tenant_scope(acme.tenant.id):
        key_services.api_key_revoke(public_id=first["public_id"])
    second = run(*arguments)
    with tenant_scope(acme.tenant.id):
        rows = ApiKey.objects.filter(public_id=second["public_id"])
        rows.update(expires_at=timezone.now())
    third = run(*arguments)
    assert [made["created"] for made in (first, second, third)] == [True] * 3


def test_key_of_an_unknown_tenant() -> None:
    with pytest.raises(CommandError, match="there is no tenant"):
        run("api_key_create", "--tenant", "nobody", "--name", "demo")


def test_operator_create_twice_sets_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for password in (PASSWORD, "another long passphrase"):
        type_password(monkeypatch, password)
        run("operator_create", "--email", "ops@lorikeet.example")
    operator = User.objects.get(email="ops@lorikeet.example")
    assert operator.is_superuser
    assert operator.is_staff
    assert operator.check_password("another long passphrase")


def test_operator_create_does_not_promote_a_member(
    acme: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_password(monkeypatch, PASSWORD)
    with pytest.raises(CommandError, match="another address"):
        run("operator_create", "--email", acme.owner.email)


def test_base_model_add_is_idempotent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    (tmp_path / "lorikeet.json").write_text(json.dumps({"name": "tiny", "revision": "a" * 64}))
    assert run("base_model_add", str(tmp_path)) == run("base_model_add", str(tmp_path))
    base_model = BaseModel.objects.get()
    assert (base_model.name, base_model.context_length) == ("tiny", 128)


def test_base_model_add_learns_its_names(tmp_path: Path, settings: Any) -> None:
    folder = tmp_path / "models--org--Tiny" / "snapshots" / "0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG | {"_name_or_path": "its/parent"}))
    (folder / "lorikeet.json").write_text(json.dumps({"name": "tiny", "revision": "a" * 64}))
    settings.BASE_MODEL, settings.BASE_MODEL_REPOSITORY = str(folder), "mirror/tiny"
    for _ in range(2):
        run("base_model_add", "--known-name", "lab/tiny")
        assert BaseModel.objects.get().known_names == ["lab/tiny", "org/Tiny", "mirror/tiny"]
    run("base_model_add", str(folder))
    assert len(BaseModel.objects.get().known_names) == 3


def test_base_model_add_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no base model's folder"):
        run("base_model_add", str(tmp_path))
