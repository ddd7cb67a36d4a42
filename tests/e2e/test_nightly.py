"""A schedule that is due trains on the tenant's dataset, and its new version answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
import pytest

from demo.seed import ROOT
from tests.e2e.system import System, until

#: Enough to change the answers, and no more.
HYPERPARAMETERS = {"rank": 4, "alpha": 8, "max_steps": 2, "batch_size": 1, "learning_rate": 0.01}
PROMPT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}


@pytest.fixture
def nightly(system: System) -> Iterator[System]:
    """The system with the two processes that retraining needs besides."""
    processes = (system.platform.trainer, system.platform.beat)
    try:
        for process in processes:
            process.start()
        yield system
    finally:
        for process in processes:
            process.ask_to_stop()
        for process in processes:
            process.stop()


def call(system: System, method: str, path: str, **options: Any) -> dict[str, Any]:
    answer = httpx.request(
        method,
        f"{system.base_url}/api/v1/{path}",
        headers={"Authorization": f"Bearer {system.tenants['acme'].api_key}"},
        timeout=30,
        **options,
    )
    assert answer.status_code < 300, answer.text
    fields: dict[str, Any] = answer.json() if answer.content else {}
    return fields


def make_due(system: System, schedule_id: str) -> None:
    with psycopg.connect(system.database_url) as connection:
        connection.execute(
            "update training_schedule set next_run_at = now() - interval '1 s' where id = %s",
            (schedule_id,),
        )


def test_a_due_schedule_trains_and_its_new_version_answers(nightly: System) -> None:
    system, adapter = nightly, nightly.tenants["acme"].adapter
    rows = (ROOT / "demo" / "data" / "acme.jsonl").read_bytes()
    call(system, "POST", "datasets?name=invoices", content=rows)
    before = call(system, "GET", f"adapters/{adapter}")["live_version"]
    runs_before = {run["id"] for run in call(system, "GET", "training-runs?limit=100")["data"]}
    schedule = call(
        system,
        "PUT",
        f"adapters/{adapter}/schedule",
        json={
            "dataset": "invoices",
            "cron": "30 2 * * *",
            "timezone": "Europe/Berlin",
            "hyperparameters": HYPERPARAMETERS,
        },
    )
    make_due(system, schedule["id"])

    def finished() -> dict[str, Any] | None:
        runs = call(system, "GET", f"training-runs?adapter={adapter}")["data"]
        active = {"queued", "running", "publishing"}
        new = [run for run in runs if run["id"] not in runs_before]
        return new[0] if new and new[0]["status"] not in active else None

    run = until(finished, "the training run has ended", timeout_s=240)
    assert (run["status"], run["error"]) == ("succeeded", "")
    assert run["progress"]["step"] == HYPERPARAMETERS["max_steps"]
    assert run["version"] > before
    [row] = call(system, "GET", f"adapters/{adapter}/schedule/runs")["data"]
    assert (row["state"], row["training_run"]) == ("succeeded", run["id"])
    [entry] = call(system, "GET", f"morning?adapter={adapter}")["data"]
    assert (entry["version"], entry["num_rows"]) == (run["version"], len(rows.splitlines()))
    assert entry["losses"][-1][0] == HYPERPARAMETERS["max_steps"]
    # It waits until somebody makes it live; then every gateway has it within a second.
    assert call(system, "GET", f"adapters/{adapter}")["live_version"] == before
    promoted = call(system, "POST", f"adapters/{adapter}/versions/{run['version']}/promote")
    assert promoted["live_version"] == run["version"]
    time.sleep(1)
    # The slot is used up: the next one is tonight's.
    assert call(system, "GET", f"adapters/{adapter}/schedule")["next_run_at"] > run["created_at"]

    client = system.client()
    answers = {
        model: client.completions.create(model=model, **PROMPT).choices[0].text  # type: ignore[call-overload]
        for model in (adapter, f"{adapter}@{before}", f"{adapter}@{run['version']}")
    }
    assert answers[adapter] == answers[f"{adapter}@{run['version']}"]
    assert answers[adapter] != answers[f"{adapter}@{before}"]
    call(system, "DELETE", f"adapters/{adapter}/schedule")
