"""/readyz names the servers that do not answer; failures of servers are counted."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis
from django.db import OperationalError, connections
from django.test import Client
from prometheus_client import REGISTRY
from redis.backoff import NoBackoff

from controlplane.infra import metrics, storage
from controlplane.infra.health import readiness
from controlplane.infra.redis_client import CountingRetry

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_kept", {})


def test_all_servers_answer(settings: Any, client: Client) -> None:
    storage.ensure_bucket()
    assert readiness.missing(*readiness.CHECKS) == []
    answer = client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "missing": []})


def test_what_does_not_answer_is_named_without_secrets(settings: Any, client: Client) -> None:
    settings.REDIS_URL = "redis://:hidden@127.0.0.1:1/0"
    settings.S3_ENDPOINT_URL = "http://127.0.0.1:1"
    began = time.monotonic()
    answer = client.get("/readyz")
    assert time.monotonic() - began < 8
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "missing": ["redis", "object store"]}


def test_a_server_is_asked_once_in_a_while(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(readiness, "CHECKS", {"redis": lambda: asked.append("redis")})
    for _ in range(20):
        assert readiness.missing("redis") == []
    assert asked == ["redis"]


def test_errors_of_redis_are_counted() -> None:
    before = REGISTRY.get_sample_value("lorikeet_redis_errors_total") or 0
    client = redis.Redis.from_url(NOWHERE, retry=CountingRetry(NoBackoff(), 1))
    with pytest.raises(redis.ConnectionError):
        client.ping()
    assert (REGISTRY.get_sample_value("lorikeet_redis_errors_total") or 0) >= before + 2


def test_errors_of_the_database_are_counted() -> None:
    before = REGISTRY.get_sample_value("lorikeet_database_errors_total") or 0
    other = connections["default"].copy()
    other.settings_dict = {**other.settings_dict, "PORT": "1", "OPTIONS": {}}
    with pytest.raises(OperationalError):
        other.ensure_connection()
    assert REGISTRY.get_sample_value("lorikeet_database_errors_total") == before + 1


def test_reasons_of_refusals_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_reasons", set())
    for number in range(500):
        metrics.count_refusal(f"made up {number}")
    reasons = {
        sample.labels["reason"]
        for sample in metrics.REFUSALS.collect()[0].samples
        if sample.labels["reason"].startswith(("made up", "other"))
    }
    assert len(reasons) <= 65 and "other" in reasons


def test_a_reading_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Any]:
        raise redis.ConnectionError("away")

    readings = {"pool": broken, "batches": lambda: [metrics.gauge("x", "", [((), 3.0)])]}
    monkeypatch.setattr(metrics, "READINGS", readings)
    found = {metric.name: metric.samples for metric in metrics._Installation().collect()}
    up = {sample.labels["reading"]: sample.value for sample in found["lorikeet_reading_up"]}
    assert up == {"pool": 0.0, "batches": 1.0}
    assert found["x"][0].value == 3.0
