"""Train the tenants' adapters by their schedules, together, on the platform's own trainer.

The schedules are made, and run once, before the platform starts: its trainer finds both runs and
trains them in one batch.
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
from demo.state import DemoState, TenantState
from worker.base_model import PACKAGED_MODEL

#: Every night at half past two; a night without new rows is skipped.
CRON, TIMEZONE = "30 2 * * *", "Europe/Berlin"
TIMEOUT_S = 1800.0


def schedule(env: Mapping[str, str], tenants: list[TenantState]) -> None:
    """Upload each tenant's rows, set its adapter's schedule, and run it once. Raises StepFailed."""
    with Commands(env) as commands:
        for tenant in tenants:
            rows = ROOT / "demo" / "data" / f"{tenant.slug}.jsonl"
            of_tenant, name = f"--tenant={tenant.slug}", f"{tenant.adapter}-rows"
            commands.run("dataset_add", of_tenant, f"--name={name}", str(rows))
            commands.run(
                *("schedule_set", of_tenant, f"--adapter={tenant.adapter}", f"--dataset={name}"),
                *(f"--base-model={PACKAGED_MODEL}", f"--cron={CRON}", f"--timezone={TIMEZONE}"),
                f"--hyperparameters={json.dumps(HYPERPARAMETERS[tenant.slug])}",
                "--run-now",
            )


def wait_until_trained(state: DemoState, report: Report) -> dict[str, dict[str, Any]]:
    """Wait for the newest run of each adapter. -> each tenant's version. Raises StepFailed.

    A run that a stopped demo left goes on.
    """
    clients = {each.slug: ManagementClient(state.base_url, each.api_key) for each in state.tenants}
    give_up_at = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < give_up_at:
            runs = {
                each.slug: _newest_run(clients[each.slug], each.adapter) for each in state.tenants
            }
            _report(runs, report)
            if all(run["status"] == "succeeded" for run in runs.values()):
                return {
                    each.slug: clients[each.slug].call(
                        "GET", f"adapters/{each.adapter}/versions/{runs[each.slug]['version']}"
                    )
                    for each in state.tenants
                }
            time.sleep(0.25)
    finally:
        for client in clients.values():
            client.close()
    raise StepFailed(
        f"the adapters were not trained within {TIMEOUT_S:.0f} s",
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


def _report(runs: Mapping[str, Mapping[str, Any]], report: Report) -> None:
    """Show the mean share of the steps that are done, and the run that is least far."""
    progress = {tenant: run["progress"] for tenant, run in runs.items()}
    shares = {
        tenant: found.get("step", 0) / found["steps"] if found.get("steps") else 0.0
        for tenant, found in progress.items()
    }
    tenant = min(shares, key=lambda each: shares[each])
    found, note = progress[tenant], runs[tenant]["status"]
    if found.get("loss") is not None:
        note = f"{tenant} step {found['step']}/{found['steps']}  loss {found['loss']:.2f}"
    report(sum(shares.values()) / len(shares), note)


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
