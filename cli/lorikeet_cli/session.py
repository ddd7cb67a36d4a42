"""Session: the account, the output format and the tenant that every command uses.

`command` gives a command the options --profile, --output and (if it is a tenant's) --tenant, and
calls it with a `Session` as its first argument.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from lorikeet_cli import output
from lorikeet_cli.client import MAX_PAGE, Client
from lorikeet_cli.config import Account, find_account
from lorikeet_cli.errors import CliError, UsageError
from lorikeet_cli.output import Column, Form

OPERATOR_PATH = "/ops/v1"
TENANT_PATH = "/api/v1"
GATEWAY_PATH = "/v1"

ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", envvar="LORIKEET_PROFILE", help="The profile to use."),
]
OutputOption = Annotated[
    Form, typer.Option("--output", "-o", help="table for people, json or id for scripts.")
]
TenantOption = Annotated[
    str | None,
    typer.Option(
        "--tenant", envvar="LORIKEET_TENANT", help="With an operator's key: the tenant's slug."
    ),
]
LimitOption = Annotated[
    int, typer.Option("--limit", "-n", min=1, help="Number of items, newest first.")
]


class Session:
    """One command's account and output; it connects when first used."""

    def __init__(self, *, profile: str | None, form: Form, tenant: str | None) -> None:
        self._profile = profile
        self._tenant = tenant
        self.form = form

    @functools.cached_property
    def account(self) -> Account:
        return find_account(self._profile)

    @functools.cached_property
    def client(self) -> Client:
        return Client(self.account)

    @property
    def is_json(self) -> bool:
        return self.form is Form.JSON

    def tenant_path(self, *parts: str | int) -> str:
        """Return a tenant's address: its own, or the operators' on its behalf.

        Raises UsageError when the key and --tenant do not fit each other.
        """
        if not self.account.is_operator:
            if self._tenant is not None:
                raise UsageError(
                    "--tenant is for operators' keys; this key belongs to one tenant. Leave "
                    "--tenant and LORIKEET_TENANT out."
                )
            return path_of(TENANT_PATH, *parts)
        if self._tenant is None:
            raise UsageError("This is an operator's key. Name the tenant with --tenant SLUG.")
        return path_of(OPERATOR_PATH, "tenants", self._tenant, *parts)

    def own_path(self, *parts: str | int) -> str:
        """Return an address that only tenants have. Raises UsageError for operators' keys."""
        if self.account.is_operator:
            raise UsageError("Operators cannot use this command. Sign in with a key of the tenant.")
        return path_of(TENANT_PATH, *parts)

    def gateway_path(self, *parts: str | int) -> str:
        """Return an address of the gateway, OpenAI's API. Raises UsageError for operators' keys."""
        self.own_path()
        return path_of(GATEWAY_PATH, *parts)

    def base_models_path(self) -> str:
        return path_of(OPERATOR_PATH if self.account.is_operator else TENANT_PATH, "base-models")

    def operator_path(self, *parts: str | int) -> str:
        """Return an address of the operators' API. Raises UsageError for a tenant's key."""
        if not self.account.is_operator:
            raise UsageError(
                "This command needs an operator's key (lk_ops_…), but the key belongs to one "
                "tenant. Sign in to another profile: lorikeet login --profile operator."
            )
        return path_of(OPERATOR_PATH, *parts)

    def get(self, *parts: str | int, **params: Any) -> Any:
        return self.client.call("GET", self.tenant_path(*parts), params=params)

    def send(self, method: str, *parts: str | int, body: Any = None) -> Any:
        return self.client.call(method, self.tenant_path(*parts), body=body)

    def items(self, *parts: str | int, limit: int, **params: Any) -> dict[str, Any]:
        return self.client.pages(self.tenant_path(*parts), params=params, limit=limit)

    def print_list(self, found: Mapping[str, Any], columns: list[Column], empty: str) -> None:
        """Print a list, whose first column names each item.

        empty  says to a person what to do when nothing is in it
        """
        if self.is_json:
            output.print_json(found)
        elif self.form is Form.ID:
            for row in found["data"]:
                output.print_id(row, columns)
        elif found["data"]:
            output.print_table(found["data"], columns)
            if found.get("has_more"):
                output.say(f"There are more: --limit {2 * len(found['data'])}.")
        else:
            output.say(empty)

    def print_one(self, row: Mapping[str, Any], columns: list[Column]) -> None:
        if self.is_json:
            output.print_json(row)
        elif self.form is Form.ID:
            output.print_id(row, columns)
        else:
            output.print_fields(row, columns)

    def say(self, text: str) -> None:
        output.say(text)


def path_of(*parts: str | int) -> str:
    """Join an address; each part after the first is one segment, whatever is in it."""
    first, *rest = parts
    for part in rest:
        if part in ("", ".", ".."):
            raise UsageError("A name is empty. Give it a value.")
    return "/".join([str(first), *(quote(str(part), safe="@") for part in rest)])


def command(
    app: typer.Typer, name: str, *, for_tenant: bool = True, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds `run(session, …)` to `app`, with the options of all commands."""
    shared = {"profile": (ProfileOption, None), "form": (OutputOption, Form.TABLE)}
    if for_tenant:
        shared["tenant"] = (TenantOption, None)

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(run)
        def with_session(**given: Any) -> None:
            session = Session(
                profile=given.pop("profile"),
                form=given.pop("form"),
                tenant=given.pop("tenant", None),
            )
            run(session, **given)

        hints = typing.get_type_hints(run, include_extras=True)
        own = list(inspect.signature(run).parameters.values())[1:]
        parameters = [each.replace(annotation=hints[each.name]) for each in own]
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters += [
            inspect.Parameter(name, kind, default=default, annotation=annotation)
            for name, (annotation, default) in shared.items()
        ]
        with_session.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_session.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name, **options)(with_session)
        return run

    return decorate


def completer(*parts: str, field: str = "name") -> Callable[[typer.Context, str], list[str]]:
    """Return a shell completion of the names in a list of the tenant's; silent when it fails."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        return [name for name in _names(ctx) if name.startswith(incomplete)]

    def _names(ctx: typer.Context) -> Iterator[str]:
        try:
            session = Session(
                profile=ctx.params.get("profile"), form=Form.JSON, tenant=ctx.params.get("tenant")
            )
            session.client = Client(session.account, attempts=1)
            is_base = parts == ("base-models",)
            path = session.base_models_path() if is_base else session.tenant_path(*parts)
            for row in session.client.pages(path, limit=MAX_PAGE)["data"]:
                yield str(row[field])
        except (CliError, LookupError):
            return

    return complete
