"""`lorikeet login`, `logout`, `whoami` and `profiles`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from lorikeet_cli import output
from lorikeet_cli.client import Client
from lorikeet_cli.config import (
    DEFAULT_PROFILE,
    Account,
    Profiles,
    check_name,
    clean_key,
    clean_url,
    is_in_the_clear,
)
from lorikeet_cli.errors import CliError, Forbidden, NotSignedIn, Unreachable, UsageError
from lorikeet_cli.session import OPERATOR_PATH, TENANT_PATH, Session, command, path_of

profiles_app = typer.Typer(help="The servers and keys that you have signed in with.")

#: lk_live_, then 22 characters that name the key.
_KEY_NAME = slice(8, 30)
_MAX_KEY_CHARS = 1000


def add_to(app: typer.Typer) -> None:
    app.command("login")(login)
    app.command("logout")(logout)
    command(app, "whoami", for_tenant=False)(whoami)
    app.add_typer(profiles_app, name="profiles")


def login(
    url: Annotated[str | None, typer.Argument(help="As https://lorikeet.example.")] = None,
    profile: Annotated[
        str, typer.Option("--profile", help="A name for this server and key.")
    ] = DEFAULT_PROFILE,
    key_stdin: Annotated[
        bool, typer.Option("--key-stdin", help="Read the key from standard input.")
    ] = False,
) -> None:
    """Check a key with the server and save both, readable by you alone."""
    check_name(profile)
    if url is None:
        if key_stdin:
            raise UsageError(
                "--key-stdin needs the server's address: run `lorikeet login URL --key-stdin`."
            )
        url = typer.prompt("Server", err=True)
    address = clean_url(url)
    if is_in_the_clear(address):
        output.say(f"Careful: {address} is not encrypted. Others on the network can read the key.")
    account = Account(address, clean_key(_ask_for_key(is_piped=key_stdin)), profile)
    tenant = _check(account)
    profiles = Profiles.load()
    profiles.accounts[profile] = account
    profiles.current = profile
    path = profiles.save()
    who = f"tenant {tenant['slug']}" if tenant else "the operator"
    output.say(f"Signed in to {address} as {who}; saved as profile {profile} in {path}.")


def _ask_for_key(*, is_piped: bool) -> str:
    if is_piped:
        return sys.stdin.readline(_MAX_KEY_CHARS)
    if not sys.stdin.isatty():
        raise UsageError("There is no terminal to ask for the key. Use --key-stdin.")
    key: str = typer.prompt("API key", hide_input=True, err=True)
    return key


def _check(account: Account) -> dict[str, Any] | None:
    """Return the key's tenant; None for an operator's key. Raises what `Client.call` raises."""
    client = Client(account)
    try:
        if account.is_operator:
            client.call("GET", f"{OPERATOR_PATH}/tenants", params={"limit": 1})
            return None
        tenant: dict[str, Any] = client.call("GET", f"{TENANT_PATH}/tenant")
        if tenant.get("object") != "tenant":
            raise Unreachable(
                f"{account.url} answers, but not as Lorikeet does. Check the address."
            )
        return tenant
    except Forbidden as error:
        if error.status == 401:
            raise NotSignedIn(
                f"{account.url} does not know this key. Copy the whole key "
                "of this server. Nothing was saved."
            ) from error
        if account.is_operator:
            return None  # a key with narrow scopes may not read its tenant
        raise
    finally:
        client.close()


def logout(
    profile: Annotated[
        str | None, typer.Option("--profile", help="The profile; without it the current one.")
    ] = None,
) -> None:
    """Remove a saved key from this machine. The key itself stays valid until it is revoked."""
    profiles = Profiles.load()
    name = profile or profiles.current
    if profiles.accounts.pop(name, None) is None:
        raise CliError(f"There is no profile {name!r}: nothing to remove.")
    if profiles.current == name:
        profiles.current = min(profiles.accounts, default=DEFAULT_PROFILE)
    profiles.save()
    output.say(f"Removed profile {name}. Its key still works: revoke it if nobody uses it.")


def whoami(session: Session) -> None:
    """Say which server and key commands use, and what the key may do."""
    account = session.account
    row: dict[str, Any] = {"url": account.url, "profile": account.profile, "key": account.key_hint}
    if account.is_operator:
        _check(account)
        row |= {"kind": "operator"}
    else:
        tenant = session.client.call("GET", f"{TENANT_PATH}/tenant")
        public_id = account.key[_KEY_NAME]
        key = session.client.call("GET", path_of(TENANT_PATH, "keys", public_id))
        row |= {"kind": "tenant", "tenant": tenant["slug"], "tenant_name": tenant["name"]}
        row |= {"key_name": key["name"], "public_id": public_id, "scopes": key["scopes"]}
        row |= {"expires_at": key["expires_at"]}
    session.print_one(row, [(name.replace("_", " "), name) for name in row])


@command(profiles_app, "list", for_tenant=False)
def list_(session: Session) -> None:
    """List the profiles."""
    profiles = Profiles.load()
    rows = [
        {"name": name, "url": each.url, "key": each.key_hint, "current": name == profiles.current}
        for name, each in sorted(profiles.accounts.items())
    ]
    session.print_list(
        {"object": "list", "data": rows, "has_more": False},
        [
            ("NAME", "name"),
            ("CURRENT", "current"),
            ("URL", "url"),
            ("KEY", "key"),
        ],
        "No profiles. Run `lorikeet login`.",
    )


@profiles_app.command("use")
def use(name: str) -> None:
    """Make a profile the one that commands use."""
    profiles = Profiles.load()
    if name not in profiles.accounts:
        raise CliError(f"There is no profile {name!r}. `lorikeet profiles list` shows them.")
    profiles.current = name
    profiles.save()
    output.say(f"Commands now use profile {name}.")
