"""Train the tenants' adapters by their schedules, together, on the platform's own trainer.

The schedules are made, and run once, before the trainer starts: it finds both runs and trains them
in one batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from demo.client import FILES, ManagementClient
from demo.commands import Commands
from demo.data.jobs import HYPERPARAMETERS
from demo.errors import StepFailed
from demo.screen import Report
from demo.seed import ROOT
from demo.state import TenantState
from worker.base_model import PACKAGED_MODEL

#: Every night at half past two; a night without new rows is skipped.
CRON, TIMEZONE = "30 2 * * *", "Europe/Berlin"
TIMEOUT_S = 1800.0


def upload_rows(commands: Commands, tenants: list[TenantState]) -> None:
    """Make each tenant's dataset. Raises StepFailed."""
    for tenant in tenants:
        rows = ROOT / "demo" / "data" / f"{tenant.slug}.jsonl"
        name = _dataset_name(tenant)
        commands.run("dataset_add", f"--tenant={tenant.slug}", f"--name={name}", str(rows))


def _dataset_name(tenant: TenantState) -> str:
    return f"{tenant.adapter}-rows"


def schedule(commands: Commands, tenants: list[TenantState]) -> None:
    """Set the schedule of each tenant's adapter, and run it once. Raises StepFailed."""
    for tenant in tenants:
        commands.run(
            "schedule_set",
            f"--tenant={tenant.slug}",
            f"--adapter={tenant.adapter}",
            f"--dataset={_dataset_name(tenant)}",
            f"--base-model={PACKAGED_MODEL}",
            f"--cron={CRON}",
            f"--timezone={TIMEZONE}",
            f"--hyperparameters={json.dumps(HYPERPARAMETERS[tenant.slug])}",
            "--run-now",
        )


def wait_until_trained(
    client: ManagementClient, tenant: TenantState, report: Report
) -> dict[str, Any]:
    """Wait for the newest run of a tenant's adapter. -> its version. Raises StepFailed.

    A run that a stopped demo left continues.
    """
    give_up_at = time.monotonic() + TIMEOUT_S
    while time.monotonic() < give_up_at:
        run = _newest_run(client, tenant.adapter)
        if run["status"] == "succeeded":
            return client.call("GET", f"adapters/{tenant.adapter}/versions/{run['version']}")
        report(*_how_far(run))
        time.sleep(0.5)
    raise StepFailed(
        f"the adapter {tenant.adapter} was not trained within {TIMEOUT_S:.0f} s",
        advice="see .demo/logs/trainer.log",
    )


def _newest_run(client: ManagementClient, adapter: str) -> dict[str, Any]:
    run: dict[str, Any] = client.call("GET", f"training-runs?adapter={adapter}&limit=1")["data"][0]
    if run["status"] in ("failed", "cancelled"):
        raise StepFailed(
            f"training {adapter} {run['status']}",
            details=run["error"],
            advice="see .demo/logs/trainer.log; training needs about 3 GB of free memory",
        )
    return run


def _how_far(run: Mapping[str, Any]) -> tuple[float, str]:
    """Return the share of the steps that are done, and the current action."""
    if run["status"] == "publishing":
        return 1.0, "trained, its files and its answers are checked"
    found = run["progress"]
    if found.get("loss") is None:
        return 0.0, run["status"]
    note = f"step {found['step']}/{found['steps']}  loss {found['loss']:.2f}"
    return found["step"] / found["steps"], note


def download(client: ManagementClient, adapter: str, number: int, folder: Path) -> None:
    """Write a version's two files into `folder`."""
    told = client.call("POST", f"adapters/{adapter}/versions/{number}/download")
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        answer = httpx.get(told["files"][file]["url"], timeout=120)
        if answer.status_code != 200:
            raise StepFailed(
                f"the object store refused {file} with status {answer.status_code}",
                advice="see .demo/stack/logs/seaweedfs.log",
            )
        (folder / file).write_bytes(answer.content)
