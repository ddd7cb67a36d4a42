"""An operator's script: a tenant from a document, and its adapter uploaded on its behalf."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo.seed import last_json, manage
from tests.cli.runner import Cli
from tests.e2e.cli.conftest import Files
from tests.e2e.system import System

SCOPES = ("tenants:write", "keys:write", "adapters:write", "datasets:write", "training:write")
DOCUMENT = """
slug = "hooli"
name = "Hooli"
owner = { email = "gavin@hooli.example" }
limits = { requests_per_minute = 600 }

[[keys]]
name = "app"
expires_at = 2099-01-01T00:00:00Z
"""


def make_key(system: System, name: str, *scopes: str) -> str:
    argv = [f"--scope={scope}" for scope in scopes]
    made = manage(system.env, "operator_key_create", f"--name={name}", "--rotate", *argv)
    key: str = last_json(made)["key"]
    return key


@pytest.fixture(scope="module")
def operator_key(system: System) -> str:
    return make_key(system, "cli", *SCOPES)


@pytest.fixture
def operator(cli: Cli, operator_key: str) -> Cli:
    return Cli(cli.home, {**cli.env, "LORIKEET_API_KEY": operator_key})


def results(answer: dict[str, Any]) -> dict[str, str]:
    return {part["path"]: part["result"] for part in answer["parts"]}


def test_a_document_is_applied_once(operator: Cli, tmp_path: Path) -> None:
    file = tmp_path / "hooli.toml"
    file.write_text(DOCUMENT)
    apply = ("tenants", "apply", "-f", str(file))
    done = operator.run(*apply, "--dry-run")
    assert done.code == 0 and "created" in done.out and "Nothing was changed" in done.err
    assert operator.run("tenants", "get", "hooli").code == 1
    made = operator.json(*apply)
    assert set(results(made).values()) == {"created"}
    (key,) = [secret["key"] for secret in made["secrets"] if "key" in secret]
    assert operator.json("whoami", LORIKEET_API_KEY=key)["tenant"] == "hooli"
    done = operator.run(*apply)
    assert done.code == 0 and "unchanged" in done.out and "lk_" not in done.out
    file.write_text(DOCUMENT.replace("600", "60"))
    assert results(operator.json(*apply))["limits"] == "changed"
    assert operator.run("tenants", "get", "hooli", "--output=id").out == "hooli\n"


def test_a_tenant_is_suspended_and_resumed(system: System, operator: Cli) -> None:
    key = system.tenants["globex"].api_key
    assert operator.json("tenants", "suspend", "globex")["status"] == "suspended"
    done = operator.run("adapters", "list", LORIKEET_API_KEY=key)
    assert done.code == 3 and "suspended" in done.err
    assert operator.json("tenants", "resume", "globex")["status"] == "active"
    assert operator.run("adapters", "list", LORIKEET_API_KEY=key).code == 0


def test_an_operator_acts_for_a_tenant(operator: Cli, files: Files) -> None:
    folder = str(files.adapter("replies"))
    version = operator.json("adapters", "upload", folder, "--wait", "--tenant=globex")
    assert (version["model"], version["status"]) == ("replies@1", "ready")
    assert operator.run("adapters", "get", "replies", LORIKEET_TENANT="globex").code == 0
    assert operator.run("adapters", "get", "replies", "--tenant=acme").code == 1
    chats = str(files.chats())
    assert operator.json("datasets", "upload", chats, "--tenant=globex")["num_rows"] == 4
    key = operator.json("keys", "create", "app", "--scope=read", "--tenant=globex")
    assert operator.json("keys", "revoke", key["public_id"], "--tenant=globex")["revoked_at"]
    done = operator.run("logs")
    assert done.code == 2 and "key of the tenant" in done.err


def test_signing_in_as_an_operator(system: System, operator: Cli, operator_key: str) -> None:
    out = Cli(operator.home)
    wrong = operator_key[:-1] + ("0" if operator_key[-1] != "0" else "1")
    assert out.run("login", system.base_url, "--key-stdin", stdin=wrong).code == 3
    done = out.run("login", system.base_url, "--key-stdin", stdin=operator_key)
    assert done.code == 0 and "as the operator" in done.err
    assert out.json("whoami")["kind"] == "operator"


def test_a_key_of_few_scopes(system: System, operator: Cli, tmp_path: Path) -> None:
    key = make_key(system, "reader", "pool:read")
    done = Cli(operator.home).run("login", system.base_url, "--key-stdin", stdin=key)
    assert done.code == 0, done.err
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"slug": "nobody", "name": "Nobody"}))
    done = operator.run("tenants", "apply", "-f", str(file), LORIKEET_API_KEY=key)
    assert done.code == 3 and "tenants:write" in done.err


def spoil_name(folder: Path) -> tuple[str, str]:
    (folder / "x.yaml").write_text("slug: x")
    return "x.yaml", "end in .json or .toml"


def spoil_syntax(folder: Path) -> tuple[str, str]:
    (folder / "x.json").write_text("{")
    return "x.json", "is not valid JSON"


def spoil_list(folder: Path) -> tuple[str, str]:
    (folder / "x.json").write_text("[]")
    return "x.json", "has to be an object"


def spoil_slug(folder: Path) -> tuple[str, str]:
    (folder / "x.toml").write_text('name = "X"')
    return "x.toml", "or name the tenant"


def spoil_size(folder: Path) -> tuple[str, str]:
    (folder / "x.toml").write_text("#" * (257 << 10))
    return "x.toml", "larger than 256 KiB"


def spoil_field(folder: Path) -> tuple[str, str]:
    (folder / "x.toml").write_text(
        'slug = "x-1"\nname = "X"\nkeys = [{ name = "a", role = "king" }]'
    )
    return "x.toml", "keys[0]"


def spoil_file(folder: Path) -> tuple[str, str]:
    return "none.toml", "No such file"


@pytest.mark.parametrize(
    "spoil",
    [spoil_name, spoil_syntax, spoil_list, spoil_slug, spoil_size, spoil_field, spoil_file],
)
def test_a_document_that_is_none(
    operator: Cli, tmp_path: Path, spoil: Callable[[Path], tuple[str, str]]
) -> None:
    name, said = spoil(tmp_path)
    done = operator.run("tenants", "apply", "-f", str(tmp_path / name))
    assert done.code in (1, 2) and said in done.err and "Traceback" not in done.err
