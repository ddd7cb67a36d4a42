"""Profiles: saved for their owner alone, whole or not at all; the environment comes before them."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable

import pytest
from lorikeet_cli.config import clean_url
from lorikeet_cli.errors import UsageError

from tests.cli.conftest import Answer, Handler
from tests.cli.runner import Cli

KEY, OTHER = "lk_live_" + "a" * 71, "lk_live_" + "b" * 71
OPERATOR = "lk_ops_" + "c" * 71
Serve = Callable[[Handler], str]


@pytest.fixture
def asked() -> list[tuple[str, str]]:
    """Path and key of each request."""
    return []


@pytest.fixture
def server(serve: Serve, asked: list[tuple[str, str]]) -> str:
    return serve(answering(asked))


def answering(asked: list[tuple[str, str]]) -> Handler:
    def answer(method: str, path: str, headers: dict[str, str], body: bytes) -> Answer:
        asked.append((path.partition("?")[0], headers["authorization"].removeprefix("Bearer ")))
        empty = {"object": "list", "data": [], "last_id": None, "has_more": False}
        own = {"object": "tenant", "slug": "acme", "name": "Acme"}
        return 200, {}, json.dumps(own if path == "/api/v1/tenant" else empty).encode()

    return answer


def sign_in(cli: Cli, url: str, key: str, profile: str = "default") -> None:
    done = cli.run("login", url, "--key-stdin", f"--profile={profile}", stdin=key + "\n")
    assert done.code == 0, done.err


def key_used(cli: Cli, asked: list[tuple[str, str]], *argv: str, **env: str) -> str:
    asked.clear()
    done = cli.run("adapters", "list", *argv, **env)
    assert done.code == 0, done.err
    return asked[0][1]


def test_only_the_owner_can_read_what_is_saved(cli: Cli, server: str) -> None:
    sign_in(cli, server, KEY)
    assert stat.S_IMODE(cli.config.stat().st_mode) == 0o600
    assert stat.S_IMODE(cli.config.parent.stat().st_mode) == 0o700
    assert [path.name for path in cli.config.parent.iterdir()] == ["config.toml"]


def test_a_key_is_never_shown(cli: Cli, server: str) -> None:
    sign_in(cli, server, KEY)
    done = cli.run("profiles", "list", "--output", "json")
    assert KEY not in done.out + done.err and done.json["data"][0]["current"] is True
    assert KEY not in cli.run("profiles", "list").out


def test_who_is_used(cli: Cli, serve: Serve, server: str, asked: list[tuple[str, str]]) -> None:
    elsewhere: list[tuple[str, str]] = []
    other = serve(answering(elsewhere))
    sign_in(cli, server, KEY)
    sign_in(cli, server, OTHER, "second")
    assert key_used(cli, asked) == OTHER, "the last signed in"
    assert key_used(cli, asked, "--profile=default") == KEY
    assert key_used(cli, asked, LORIKEET_PROFILE="default") == KEY
    assert key_used(cli, asked, LORIKEET_API_KEY="lk_live_env") == "lk_live_env"
    assert key_used(cli, asked, LORIKEET_URL=server) == OTHER
    assert key_used(cli, elsewhere, LORIKEET_URL=other, LORIKEET_API_KEY="k") == "k"
    cli.run("profiles", "use", "default")
    assert key_used(cli, asked) == KEY
    # A saved key does not go to another server.
    elsewhere.clear()
    done = cli.run("adapters", "list", LORIKEET_URL=other)
    assert (done.code, elsewhere) == (3, [])
    assert "No key for" in done.err and "LORIKEET_API_KEY" in done.err


def test_signing_out_removes_the_key(cli: Cli, server: str) -> None:
    sign_in(cli, server, KEY)
    sign_in(cli, server, OTHER, "second")
    assert cli.run("logout").code == 0
    assert OTHER not in cli.config.read_text() and KEY in cli.config.read_text()
    assert cli.run("adapters", "list").code == 0, "the other profile is there"
    assert cli.run("logout").code == 0
    assert "lk_" not in cli.config.read_text()
    done = cli.run("adapters", "list")
    assert done.code == 3 and "Run `lorikeet login`" in done.err
    assert cli.run("logout").code == 1


def test_the_key_is_asked_for_in_a_terminal_and_not_shown(cli: Cli, server: str) -> None:
    code, shown = cli.run_in_terminal("login", typed={"Server": server, "API key": KEY})
    assert code == 0 and "Signed in" in shown, shown
    assert KEY in cli.config.read_text() and KEY not in shown


def test_without_a_terminal_the_key_comes_from_standard_input(cli: Cli, server: str) -> None:
    done = cli.run("login", server, stdin=KEY)
    assert done.code == 2 and "--key-stdin" in done.err
    assert cli.run("login", "--key-stdin", stdin=KEY).code == 2, "no address"
    assert cli.run("login", server, "--key-stdin", stdin="").code == 2, "no key"
    assert not cli.config.exists()


DAMAGED = {
    "no TOML": "profiles = [",
    "no key": '[profiles.default]\nurl = "http://localhost"\n',
    "no address": '[profiles.default]\nurl = "ftp://x"\nkey = "k"\n',
    "no table": "profiles = 3\n",
    "no text": '[profiles.default]\nurl = 3\nkey = "k"\n',
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_line(cli: Cli, text: str) -> None:
    cli.config.parent.mkdir(parents=True)
    cli.config.write_text(text)
    done = cli.run("adapters", "list")
    assert done.code == 1 and "config.toml is damaged" in done.err and "Traceback" not in done.err
    assert "lorikeet login" in done.err


def test_others_who_can_read_the_file_are_warned_of(cli: Cli, server: str) -> None:
    sign_in(cli, server, KEY)
    cli.config.chmod(0o644)
    done = cli.run("adapters", "list")
    assert done.code == 0 and f"chmod 600 {cli.config}" in done.err


def test_a_home_that_is_in_the_way(cli: Cli, server: str) -> None:
    (cli.home / ".config").write_text("a file")
    done = cli.run("login", server, "--key-stdin", stdin=KEY)
    assert done.code == 1 and "Cannot read" in done.err and "Traceback" not in done.err
    (cli.home / ".config").unlink()
    (cli.home / ".config").symlink_to("/proc")
    done = cli.run("login", server, "--key-stdin", stdin=KEY)
    assert done.code == 1 and "Cannot write" in done.err and "Traceback" not in done.err


def test_keys_and_tenants_that_do_not_fit(
    cli: Cli, server: str, asked: list[tuple[str, str]]
) -> None:
    def ask(*argv: str, key: str) -> tuple[int, str]:
        done = cli.run(*argv, LORIKEET_URL=server, LORIKEET_API_KEY=key)
        return done.code, done.err

    code, said = ask("adapters", "list", key=OPERATOR)
    assert code == 2 and "--tenant SLUG" in said
    code, said = ask("adapters", "list", "--tenant=acme", key=KEY)
    assert code == 2 and "operators' keys" in said
    code, said = ask("tenants", "list", key=KEY)
    assert code == 2 and "needs an operator's key" in said
    assert asked == []
    assert ask("adapters", "list", "--tenant=acme", key=OPERATOR)[0] == 0
    assert ask("adapters", "list", "--tenant=../x", key=OPERATOR)[0] == 0
    paths = ["/ops/v1/tenants/acme/adapters", "/ops/v1/tenants/..%2Fx/adapters"]
    assert [path for path, _ in asked] == paths


GOOD = {
    "lorikeet.example": "https://lorikeet.example",
    "localhost:8000": "http://localhost:8000",
    "127.0.0.1:8000/": "http://127.0.0.1:8000",
    "https://LORIKEET.example/v1": "https://lorikeet.example",
    "https://a.example/llm/api/v1/": "https://a.example/llm",
    "http://[::1]:8000": "http://[::1]:8000",
}


@pytest.mark.parametrize(("given", "meant"), GOOD.items(), ids=GOOD)
def test_addresses_as_people_write_them(given: str, meant: str) -> None:
    assert clean_url(given) == meant == clean_url(meant)


@pytest.mark.parametrize(
    "given",
    ["", "ftp://a", "https://", "https://u:p@a", "https://a?x=1", "https://a:b", "a b", "ä"],
)
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(UsageError):
        clean_url(given)
