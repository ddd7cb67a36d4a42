"""The profile `monitoring`: Prometheus with our file finds every process; panels and alerts work.

Grafana is not started: it has no stand-in. What it would ask for its panels is asked here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from tests.compose.docker import inspect
from tests.compose.stack import BASE, Client, Stack, wait_until
from tests.compose.standins import ROOT

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

PROCESSES = {
    *("web", "accountant", "batch-runner", "celery", "beat", "trainer", "inspector", "worker"),
}
#: What Grafana puts there for a scrape interval of 15 s.
RATE_INTERVAL = "1m"
#: Panels of what does not happen here: a run, or the first use of an adapter.
MAY_BE_EMPTY = {"Progress of the running runs", "Mean time of a load, by tier"}


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

    def is_up(self) -> dict[str, bool]:
        """Process -> whether all of its containers answered the last time."""
        rows = self.query('min by (process) (up{job="lorikeet"})')
        return {row["metric"]["process"]: row["value"][1] == "1" for row in rows}


@pytest.fixture(scope="module")
def prometheus(stack: Stack, acme: Client) -> Iterator[Prometheus]:
    """Started as one would, after which there are requests for long enough."""
    stack.compose("--profile", "monitoring", "up", "--detach", "prometheus")
    try:
        wait_until(lambda: stack.is_well("prometheus"), timeout_s=120, what=stack.describe)
        found = Prometheus(stack)
        wait_until(lambda: found.is_up() == dict.fromkeys(PROCESSES, True), timeout_s=120)
        until = time.monotonic() + 40  # three scrapes
        for number in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count()):
            acme.chat(BASE, "Hello?")
            acme.chat(BASE, "As JSON, please.", response_format=new_schema(number))
            with contextlib.suppress(AssertionError):
                acme.chat("nobodys", "Hello?")
            time.sleep(2)
        yield found
    finally:
        stack.compose("--profile", "monitoring", "rm", "--stop", "--force", "prometheus")


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


def test_every_panel_of_the_dashboard_shows_something(prometheus: Prometheus) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "lorikeet.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel.get("targets")]
    assert len(panels) > 30
    empty = {
        panel["title"]
        for panel in panels
        if not any(
            prometheus.query(target["expr"].replace("$__rate_interval", RATE_INTERVAL))
            for target in panel["targets"]
        )
    }
    assert empty <= MAY_BE_EMPTY


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
