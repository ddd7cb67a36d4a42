"""Every process tells its metrics; dashboard and alerts name only what is told; no label grows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from demo.seed import ROOT
from tests.e2e.system import System, until

DASHBOARD = ROOT / "deploy" / "grafana" / "lorikeet.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
#: Labels may have few values: none of these names a tenant, a key, an adapter or a request.
LABELS = {
    *("le", "surface", "status", "reason", "outcome", "priority", "state", "use", "tier", "cause"),
    *("pool", "base_model", "queue", "task", "kind", "verdict", "result", "reading", "warmth"),
    "source",
}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
SUFFIXES |= {"summary": ("_count", "_sum"), "gauge": ("",)}
#: Prometheus makes these.
GIVEN = {"up"}

Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def others(system: System) -> Iterator[None]:
    """The processes that the other tests of this folder do not need."""
    started = (system.platform.beat, system.platform.batch_runner)
    for process in started:
        process.start()
    yield
    for process in started:
        process.ask_to_stop()
    for process in started:
        process.stop()


@pytest.fixture(scope="module")
def told(system: System, others: None) -> dict[str, Samples]:
    """Process -> what it tells, after requests that ended well and badly."""
    client = system.client()
    messages: Any = [{"role": "user", "content": "Say hello."}]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for model in (system.tenants["acme"].adapter, system.base_model):
        client.chat.completions.create(model=model, messages=messages, max_tokens=4)
    client.chat.completions.create(
        model=system.base_model, messages=messages, max_tokens=8, response_format=form
    )
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobodys", messages=messages)

    def settled() -> bool:
        samples = scrape(system, "accountant")["lorikeet_usage_records_total"]
        return value(samples, result="settled") >= 3

    until(settled, "the accountant's records")
    until(lambda: scrape(system, "beat").get("lorikeet_tasks_sent_total"), "beat's first task", 40)
    until(lambda: scrape(system, "celery").get("lorikeet_tasks_total"), "the first task", 40)
    processes = ("web", "worker", "accountant", "celery", "beat", "batch-runner")
    return {process: scrape(system, process) for process in processes}


def url(system: System, process: str, path: str = "metrics") -> str:
    return f"http://127.0.0.1:{system.platform.metrics_ports[process]}/{path}"


def scrape(system: System, process: str) -> Samples:
    """Name -> its samples; also of what has no sample yet."""
    try:
        answer = httpx.get(url(system, process), timeout=20)
    except httpx.TransportError:
        return {}
    assert answer.status_code == 200, answer.text
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        for suffix in SUFFIXES.get(family.type, ("",)):
            found.setdefault(family.name + suffix, [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(samples: list[tuple[dict[str, str], float]], **labels: str) -> float:
    return sum(found for own, found in samples if labels.items() <= own.items())


def queries() -> list[str]:
    dashboard, rules = json.loads(DASHBOARD.read_text()), yaml.safe_load(ALERTS.read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return shown + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_dashboard_and_alerts_name_what_is_told(told: dict[str, Samples]) -> None:
    found = {name for samples in told.values() for name in samples} | GIVEN
    pattern = re.compile(r"\b(?:lorikeet|process)_\w+")
    named = {name for query in queries() for name in pattern.findall(query)}
    assert len(named) > 40
    assert named - found == set()


def test_labels_that_queries_use_are_there(told: dict[str, Samples]) -> None:
    """A label that no sample has makes a panel or an alert that is always empty."""
    own: dict[str, set[str]] = {}
    for samples in told.values():
        for name, of_name in samples.items():
            for labels, _ in of_name:
                own.setdefault(name, set()).update(labels)
    for query in queries():
        for name, matchers in re.findall(r"\b(lorikeet_\w+)\{([^}]*)\}", query):
            if name in own:
                used = set(re.findall(r"(\w+)=", matchers)) - {"process", "job"}
                assert used <= own[name], query


def test_labels_are_few_and_name_no_tenant(system: System, told: dict[str, Samples]) -> None:
    tenants = list(system.tenants.values())
    secret = [word for t in tenants for word in (t.slug, t.adapter, t.digest, t.api_key) if word]
    for samples in told.values():
        for name, of_name in samples.items():
            if not name.startswith("lorikeet_"):
                continue
            for labels, _ in of_name:
                assert set(labels) <= LABELS, name
                for word in secret:
                    assert not any(word in text for text in labels.values()), (name, labels)
            bare = {tuple(sorted((labels | {"le": ""}).items())) for labels, _ in of_name}
            assert len(bare) < 64, name


def test_each_process_counts_what_it_does(told: dict[str, Samples], system: System) -> None:
    worker, web, accountant = told["worker"], told["web"], told["accountant"]
    assert value(worker["lorikeet_requests_total"], priority="interactive") >= 3
    assert value(worker["lorikeet_time_to_first_token_seconds_count"]) >= 3
    assert value(worker["lorikeet_engine_step_seconds_sum"]) > 0
    steps = value(worker["lorikeet_engine_steps_total"])
    assert value(worker["lorikeet_engine_step_rows_count"]) == pytest.approx(steps, abs=2)
    assert value(worker["lorikeet_engine_step_rows_sum"]) >= steps - 2
    for tier in ("disk", "host", "arena"):
        assert value(worker["lorikeet_adapter_load_seconds_count"], tier=tier) >= 1
    assert value(worker["lorikeet_grammar_compile_seconds_count"]) >= 1
    assert value(worker["lorikeet_pages"]) == system_pages(system)
    assert value(web["lorikeet_refusals_total"], reason="model_not_found") >= 1
    assert value(web["lorikeet_http_requests_total"], surface="gateway", status="200") >= 3
    assert value(accountant["lorikeet_workers"], state="ready") == 1
    assert value(accountant["lorikeet_desired_workers"], base_model=system.base_model) == 1
    assert {value([row]) for row in accountant["lorikeet_reading_up"]} == {1.0}
    assert value(told["celery"]["lorikeet_tasks_total"], state="success") >= 1
    assert value(told["beat"]["lorikeet_tasks_sent_total"]) >= 1
    for process in ("web", "batch-runner", "celery", "beat", "worker"):
        assert "lorikeet_workers" not in told[process], "only one process tells what is of all"


def system_pages(system: System) -> int:
    heartbeat = system.platform.heartbeat()
    assert heartbeat is not None
    return heartbeat.num_pages


def test_each_process_says_that_it_lives_and_can_serve(system: System, others: None) -> None:
    for process in ("web", "worker", "accountant", "celery", "beat", "batch-runner"):
        assert httpx.get(url(system, process, "healthz")).text == "ok"
        ready = httpx.get(url(system, process, "readyz"), timeout=20)
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "missing": []}), process
    public = httpx.get(f"{system.base_url}/readyz")
    assert public.json() == {"ready": True, "missing": []}
    assert httpx.get(f"{system.base_url}/metrics").status_code == 404  # never on the public port


def test_prometheus_takes_the_rules() -> None:
    rules = yaml.safe_load(ALERTS.read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    text = (ROOT / "docs" / "metrics.md").read_text()
    for alert in alerts:
        assert alert["labels"]["severity"] in {"page", "warn"}
        assert alert["annotations"]["summary"]
        assert f"`{alert['alert']}`" in text, "docs/metrics.md says what to do"
    if promtool := shutil.which("promtool"):
        config = ROOT / "deploy" / "prometheus" / "prometheus.yml"
        subprocess.run([promtool, "check", "config", str(config)], check=True)


def test_each_metric_is_explained(told: dict[str, Samples]) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    ours = {name for samples in told.values() for name in samples if name.startswith("lorikeet_")}
    bare = {re.sub(r"_(bucket|count|sum)$", "", name) for name in ours}
    assert {name for name in bare if f"`{name}`" not in text} == set()
