"""Migrations, tenants, people and keys, made by the control plane's own commands."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.errors import StepFailed
from demo.state import DemoState, TenantState

ROOT = Path(__file__).parent.parent


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
        raise StepFailed(
            f"manage.py {argv[0]} ended with status {result.returncode}",
            details="\n".join((result.stdout + result.stderr).splitlines()[-25:]),
            advice="fix what it names; if .demo is from an older checkout, delete it",
        )
    return result.stdout


def migrate(env: Mapping[str, str]) -> None:
    manage(env, "migrate", "--no-input", "--verbosity=0")
    manage(env, "collectstatic", "--no-input", "--verbosity=0")


def seed(env: Mapping[str, str], state: DemoState, base_model_dir: Path) -> None:
    """Make the operator, the base model, and each tenant with an admin and a key.

    Can be run again after it failed half-way; keys already made are kept.
    """
    manage(
        env,
        "operator_create",
        f"--email={state.operator_email}",
        "--password-stdin",
        stdin=state.operator_password + "\n",
    )
    manage(env, "base_model_add", str(base_model_dir))
    for tenant in state.tenants:
        _seed_tenant(env, tenant)


def _seed_tenant(env: Mapping[str, str], tenant: TenantState) -> None:
    manage(env, "tenant_create", f"--slug={tenant.slug}", f"--name={tenant.name}")
    manage(
        env,
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
        tenant.api_key = last_json(manage(env, *argv))["key"]


def last_json(output: str) -> dict[str, Any]:
    """Parse the last line that one of our commands printed."""
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return answer
