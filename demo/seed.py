"""Migrations, tenants, people and keys, made by the control plane's own commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from demo.commands import ROOT, Commands, failed
from demo.state import DemoState, TenantState

__all__ = ["ROOT", "last_json", "manage", "migrate", "seed"]


def manage(env: Mapping[str, str], *argv: str, stdin: str = "") -> str:
    """Run one of manage.py's commands and return its output. Raises StepFailed."""
    result = subprocess.run(
        [sys.executable, "manage.py", *argv],
        cwd=ROOT,
        env=dict(env),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise failed(argv[0], result.returncode, result.stdout + result.stderr)
    return result.stdout


def migrate(commands: Commands) -> None:
    commands.run("migrate", "--no-input", "--verbosity=0")
    commands.run("collectstatic", "--no-input", "--verbosity=0")


def seed(commands: Commands, state: DemoState) -> None:
    """Make the operator, and each tenant with an admin and a key.

    Can be run again after it failed half-way; keys already made are kept.
    """
    commands.run(
        "operator_create",
        f"--email={state.operator_email}",
        "--password-stdin",
        stdin=state.operator_password + "\n",
    )
    for tenant in state.tenants:
        _seed_tenant(commands, tenant)


def _seed_tenant(commands: Commands, tenant: TenantState) -> None:
    commands.run("tenant_create", f"--slug={tenant.slug}", f"--name={tenant.name}")
    commands.run(
        "member_add",
        f"--tenant={tenant.slug}",
        f"--email={tenant.email}",
        "--role=owner",
        "--password-stdin",
        stdin=tenant.password + "\n",
    )
    if not tenant.api_key:
        # An earlier run made the key and ended before it saved the secret.
        argv = ["api_key_create", f"--tenant={tenant.slug}", "--name=demo", "--rotate"]
        tenant.api_key = last_json(commands.run(*argv))["key"]


def last_json(output: str) -> dict[str, Any]:
    """Parse the last line that one of our commands printed."""
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return answer
