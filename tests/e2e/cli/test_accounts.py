"""Signing in at the real server, and the keys that a tenant gives to others."""

from __future__ import annotations

from tests.cli.runner import Cli
from tests.e2e.system import System


def test_signing_in_checks_the_key_and_says_who_one_is(
    system: System, cli: Cli, admin_key: str
) -> None:
    out = Cli(cli.home)
    wrong = admin_key[:-1] + ("0" if admin_key[-1] != "0" else "1")
    done = out.run("login", system.base_url, "--key-stdin", stdin=wrong)
    assert done.code == 3 and "does not know this key" in done.err
    assert not out.config.exists()
    done = out.run("login", f"{system.base_url}/v1", "--key-stdin", stdin=admin_key)
    assert done.code == 0 and "as tenant acme" in done.err
    who = out.json("whoami")
    assert (who["url"], who["tenant"], who["key_name"]) == (system.base_url, "acme", "admin")
    assert "keys:manage" in who["scopes"]


def test_a_key_is_made_rotated_and_revoked(system: System, cli: Cli) -> None:
    made = cli.json("keys", "create", "ci", "--scope=read", "--expires-in=90d", "--ip=127.0.0.1")
    assert made["scopes"] == ["read"] and made["allowed_ips"] == ["127.0.0.1/32"]
    assert made["expires_at"] is not None

    def works(key: str) -> int:
        return cli.run("adapters", "list", LORIKEET_API_KEY=key).code

    assert works(made["key"]) == 0
    rotated = cli.json("keys", "rotate", made["public_id"], "--grace=0s")
    assert rotated["key"] != made["key"] and works(rotated["key"]) == 0
    listed = {key["public_id"] for key in cli.json("keys", "list")["data"]}
    assert made["public_id"] in listed
    done = cli.run("keys", "revoke", made["public_id"])
    assert done.code == 0 and "revoked" in done.out
    done = cli.run("adapters", "list", LORIKEET_API_KEY=rotated["key"])
    assert done.code == 3 and "refuses the key" in done.err


def test_what_a_key_may_not_do_is_said_so(cli: Cli) -> None:
    key = cli.json("keys", "create", "reader", "--scope=read")["key"]
    done = cli.run("keys", "create", "more", LORIKEET_API_KEY=key)
    assert done.code == 3 and done.out == "" and "keys:manage" in done.err
    done = cli.run("keys", "create", "x", "--scope=everything")
    assert done.code == 1 and "scopes" in done.err
    done = cli.run("keys", "create", "x", "--expires-in=soon")
    assert done.code == 2 and "90d" in done.err


def test_names_are_completed(system: System, cli: Cli) -> None:
    env = {"_LORIKEET_COMPLETE": "complete_bash", "COMP_WORDS": "lorikeet adapters get inv"}
    code = "import sys; sys.argv[0] = 'lorikeet'; from lorikeet_cli.app import main; main()"
    words = cli.run_python(code, COMP_CWORD="3", **env).out.split()
    assert words == [system.tenants["acme"].adapter]
    away = cli.run_python(code, COMP_CWORD="3", **env, LORIKEET_URL="http://127.0.0.1:1")
    assert (away.code, away.out.strip(), away.err) == (0, "", "")
