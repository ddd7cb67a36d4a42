"""The profile `monitoring`: Prometheus with our file finds every process; panels and alerts work.

Grafana is not started: it has no stand-in. What it would ask for its panels is asked here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.compose import dashboard
from tests.compose.docker import inspect
from tests.compose.stack import BASE, Client, Stack, start_run, wait_until
from tests.compose.standins import ROOT

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

PROCESSES = {
    *("web", "accountant", "batch-runner", "celery", "beat", "trainer", "inspector", "worker"),
}
#: What Grafana puts there for a scrape interval of 15 s.
RATE_INTERVAL = "1m"
#: Seconds between two points of a panel.
STEP_S = 5


class Prometheus:
    def __init__(self, stack: Stack) -> None:
        self._http = httpx.Client(base_url=f"{stack.prometheus_url}/api/v1", timeout=30)

    def ask(self, path: str, **parameters: str) -> Any:
        answer = self._http.get(path, params=parameters)
        assert answer.status_code == 200, (parameters, answer.text)
        body = answer.json()
        assert body["status"] == "success" and not body.get("warnings"), (parameters, body)
        return body["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def query_range(self, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
        """What a panel shows of `expression` from `begin` to `end`, in seconds since 1970."""
        expression = expression.replace("$__rate_interval", RATE_INTERVAL)
        times = {"start": str(begin), "end": str(end), "step": str(STEP_S)}
        found: list[dict[str, Any]] = self.ask("query_range", query=expression, **times)["result"]
        return found

    def is_up(self) -> dict[str, bool]:
        """Process -> whether all of its containers answered the last time."""
        rows = self.query('min by (process) (up{job="lorikeet"})')
        return {row["metric"]["process"]: row["value"][1] == "1" for row in rows}


@pytest.fixture(scope="module")
def prometheus(stack: Stack) -> Iterator[Prometheus]:
    """Started as one would."""
    stack.compose("--profile", "monitoring", "up", "--detach", "prometheus")
    try:
        wait_until(lambda: stack.is_well("prometheus"), timeout_s=120, what=stack.describe)
        found = Prometheus(stack)
        wait_until(lambda: found.is_up() == dict.fromkeys(PROCESSES, True), timeout_s=120)
        yield found
    finally:
        stack.compose("--profile", "monitoring", "rm", "--stop", "--force", "prometheus")


@pytest.fixture(scope="module")
def load(stack: Stack, acme: Client, prometheus: Prometheus) -> Iterator[tuple[float, float]]:
    """Two runs that the worker trains beside requests of all kinds; when all began and ended."""
    at_night = {"LORIKEET_TRAINING_SOCKET": "/run/training/worker-0.sock"}
    both = ("worker-cpu", "trainer-cpu")
    begin = time.time()
    stack.compose("up", "--detach", "--no-deps", *both, **at_night)
    try:
        wait_until(lambda: all(map(stack.is_well, both)), timeout_s=180, what=stack.describe)
        run = start_run(acme, "seen", max_steps=2)
        ask_until(acme, BASE, lambda: has_ended(acme, run))
        run = start_run(acme, "seen", max_steps=8)
        ask_until(acme, "seen", lambda: has_ended(acme, run))
        time.sleep(40)  # three scrapes
        yield begin, time.time()
    finally:
        stack.compose("up", "--detach", "--no-deps", *both)
        wait_until(lambda: all(map(stack.is_well, both)), timeout_s=180, what=stack.describe)


def has_ended(client: Client, run: str) -> bool:
    answer = client.call("GET", run)
    assert answer["status"] not in ("failed", "cancelled"), answer["error"]
    return bool(answer["status"] == "succeeded")


def ask_until(client: Client, model: str, is_done: Callable[[], bool]) -> None:
    """Chat, with and without a schema, and in vain, until it is done."""
    deadline = time.monotonic() + 900
    for number in itertools.count():
        assert time.monotonic() < deadline
        client.chat(model, "Hello?")
        client.chat(BASE, "As JSON, please.", response_format=new_schema(number))
        with contextlib.suppress(AssertionError):
            client.chat("nobodys", "Hello?")
        if is_done():
            return
        time.sleep(1)


def new_schema(number: int) -> dict[str, Any]:
    """A grammar that no worker has seen."""
    name = f"is_{number}"
    schema = {"type": "object", "properties": {name: {"type": "boolean"}}, "required": [name]}
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def test_prometheus_is_as_confined_as_the_others(stack: Stack, prometheus: Prometheus) -> None:
    host = inspect(stack.container("prometheus"))["HostConfig"]
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["Memory"] > 0
    [bound] = host["PortBindings"].values()
    assert [port["HostIp"] for port in bound] == ["127.0.0.1"]
    targets = prometheus.ask("targets", state="active")["activeTargets"]
    assert {target["health"] for target in targets} == {"up"}
    assert len(targets) == len(PROCESSES)


def test_every_panel_of_the_dashboard_shows_something(
    prometheus: Prometheus, load: tuple[float, float], scratch: Path
) -> None:
    """What it looks like is in .test/compose/dashboard.html, and .png where Chromium is."""
    board = json.loads((ROOT / "deploy" / "grafana" / "lorikeet.json").read_text())
    panels = [panel for panel in board["panels"] if panel.get("targets")]
    assert len(panels) > 30

    def query(expression: str) -> list[dict[str, Any]]:
        return prometheus.query_range(expression, *load)

    page = scratch / "dashboard.html"
    page.write_text(dashboard.draw(board, query, *load))
    dashboard.screenshot(page, page.with_suffix(".png"), board)
    assert {panel["title"] for panel in panels if not dashboard.lines_of(panel, query)} == set()
    trained = query("sum(rate(lorikeet_training_seconds_total[$__rate_interval]))")
    assert max(float(value) for _, value in trained[0]["values"]) > 0.1


def test_every_alert_is_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    text = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    written = [rule["alert"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), timeout_s=60)
    assert [rule["name"] for rule in rules()] == written
    assert {rule["health"] for rule in rules()} == {"ok"}, rules()
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []


def test_a_process_that_is_gone_is_noticed(stack: Stack, prometheus: Prometheus) -> None:
    """Its name leads nowhere then, so that nothing is left that could be down."""
    stack.compose("stop", "batch-runner")
    try:
        waiting = 'ALERTS{alertname="LorikeetProcessDown", process="batch-runner"}'
        wait_until(lambda: bool(prometheus.query(waiting)), timeout_s=90)
    finally:
        stack.compose("start", "batch-runner")
    wait_until(lambda: not prometheus.query(waiting), timeout_s=120)
    wait_until(lambda: stack.is_well("batch-runner"), timeout_s=120, what=stack.describe)
