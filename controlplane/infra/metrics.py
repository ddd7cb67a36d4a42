"""The metrics of the control plane's processes, and the port where Prometheus reads them.

docs/metrics.md has the list. Labels have few values: never a tenant, a key, an adapter or an id.

A process that forks (Celery's worker) counts in files that its children share:
`controlplane.celery` sets the variable that prometheus_client reads for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from django.conf import settings
from django.db import connection
from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from contract.adapters.probe_server import PortTaken, ProbeServer
from controlplane.infra.health import liveness, readiness

log = logging.getLogger(__name__)

Send = Callable[[Mapping[str, Any]], Awaitable[None]]

disable_created_metrics()  # type: ignore[no-untyped-call]  # half of all series, and of no use here

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_MINUTES = (0.1, 1, 10, 60, 300, 900, 3600, 4 * 3600)

HTTP_REQUESTS = Counter(
    "lorikeet_http_requests", "Answers of the web process.", ("surface", "status")
)
HTTP_SECONDS = Histogram(
    "lorikeet_http_response_start_seconds",
    "From a request to the first byte of its answer; for a stream, its first token.",
    ("surface",),
    buckets=_SECONDS,
)
REFUSALS = Counter(
    "lorikeet_refusals", "Requests to the gateway that were refused before the queue.", ("reason",)
)
DATABASE_ERRORS = Counter(
    "lorikeet_database_errors", "Connections and statements that PostgreSQL did not answer."
)
REDIS_ERRORS = Counter(
    "lorikeet_redis_errors", "Connections and commands that Redis did not answer."
)
REAPED = Counter("lorikeet_reaped_requests", "Requests taken over from dead workers.", ("verdict",))
USAGE_RECORDS = Counter(
    "lorikeet_usage_records", "Ended requests that the accountant took from Redis.", ("result",)
)
BATCH_LINES = Counter("lorikeet_batch_lines", "Lines of batches with a result.", ("outcome",))
BATCHES_ENDED = Counter("lorikeet_batches_ended", "Batches that have ended.", ("status",))
TASKS = Counter("lorikeet_tasks", "Celery tasks that have ended.", ("task", "state"))
TASK_SECONDS = Histogram(
    "lorikeet_task_seconds", "How long Celery tasks took.", ("task",), buckets=_MINUTES
)
TASKS_SENT = Counter("lorikeet_tasks_sent", "Tasks that beat has put into a queue.", ("task",))
CANARY_ROLLBACKS = Counter(
    "lorikeet_canary_rollbacks", "Canaries that were rolled back by themselves."
)
CHECKS_ENDED = Counter(
    "lorikeet_adapter_checks_ended", "Child processes that checked an adapter.", ("outcome",)
)
ADAPTER_IMPORTS = Counter(
    "lorikeet_adapter_imports", "Attempts to fetch the files of an imported adapter.", ("result",)
)
DATASET_PULLS = Counter(
    "lorikeet_dataset_pulls", "Attempts to pull a dataset from its source.", ("result",)
)
TRAINING_ENDED = Counter("lorikeet_training_runs_ended", "Training runs that ended.", ("status",))
SCHEDULE_SLOTS = Counter(
    "lorikeet_schedule_slots",
    "Slots of schedules, and how the runs ended that they started.",
    ("outcome",),
)
OUTBOUND_CALLS = Counter(
    "lorikeet_outbound_calls", "Calls to addresses that tenants named.", ("result",)
)
WEBHOOK_ATTEMPTS = Counter(
    "lorikeet_webhook_attempts", "Attempts to deliver an event to a webhook.", ("result",)
)
EVENT_MAILS = Counter("lorikeet_event_mails", "Mails about events.", ("result",))
PROBES = Counter("lorikeet_adapter_probes", "Probes of adapter versions by result.", ("verdict",))
EVALUATIONS_ENDED = Counter("lorikeet_evaluations_ended", "Evaluations that ended.", ("status",))
GATE_DECISIONS = Counter(
    "lorikeet_gate_decisions", "What the gate decided about new versions.", ("verdict",)
)
GATE_SCORES = Counter(
    "lorikeet_gate_scores", "Gates by who scores their expected answers.", ("source",)
)
TRAINERS_LOST = Counter("lorikeet_trainers_lost", "Training runs queued again: their trainer died.")
TRAINING_STATES = Counter(
    "lorikeet_training_states", "States of training runs sent to the store.", ("result",)
)
TRAINING_CALLS = Counter(
    "lorikeet_training_calls", "Calls of training clients that were done.", ("kind", "result")
)
TRAINING_CLIENT_STATES = Counter(
    "lorikeet_training_client_states",
    "States of idle training clients that left a trainer's memory, or came back.",
    ("outcome",),
)
TRAINING_MESSAGES = Counter(
    "lorikeet_training_messages", "Messages that this process sent to the trainers."
)
CAPTURED_REQUESTS = Counter("lorikeet_captured_requests", "Requests kept to train on.")
FEEDBACK = Counter("lorikeet_feedback", "Feedback on requests' answers.", ("kind",))
TRAINING_STEPS = Counter("lorikeet_training_steps", "Steps of training runs.")

# Initialise all labels: else the first event of each kind would not show as an increase.
for _counter, _values in (
    (USAGE_RECORDS, ("settled", "rejected")),
    (REAPED, ("requeued", "end", "over", "unserved")),
    (BATCH_LINES, ("completed", "failed")),
    (CHECKS_ENDED, ("answered", "over_bounds", "broken", "lost")),
    (ADAPTER_IMPORTS, ("fetched", "rejected", "again", "lost")),
    (DATASET_PULLS, ("unchanged", "added", "failed", "lost")),
    (OUTBOUND_CALLS, ("answered", "refused", "failed")),
    (WEBHOOK_ATTEMPTS, ("succeeded", "failed")),
    (EVENT_MAILS, ("sent", "failed", "dropped")),
    (TRAINING_STATES, ("stored", "failed")),
    (TRAINING_CLIENT_STATES, ("stored", "fetched")),
    (TRAINING_ENDED, ("succeeded", "failed", "cancelled")),
    (SCHEDULE_SLOTS, ("ran", "skipped", "missed", "succeeded", "failed")),
    (EVALUATIONS_ENDED, ("succeeded", "failed")),
    (GATE_DECISIONS, ("promote", "hold", "reject")),
    (GATE_SCORES, ("batch", "workers")),
    (FEEDBACK, ("good", "bad", "corrected", "not_captured")),
    (PROBES, ("agreed", "rejected", "mismatch_live", "not_run")),
):
    for _value in _values:
        _counter.labels(_value)

#: The first parts of addresses -> the surface that they are counted under.
_SURFACES = {"v1": "gateway", "tinker": "gateway", "api": "management", "ops": "operators"}
_SURFACES |= {name: name for name in ("console", "admin", "static")}
#: Largest number of reasons: a bound, if one is ever made from a client's text.
_MAX_REASONS = 64
_reasons: set[str] = set()

#: Readings of the whole installation, which one process makes; apps add theirs when ready.
READINGS: dict[str, Callable[[], Iterable[Metric]]] = {}
#: Time during which scrapes get the same readings.
_READINGS_KEPT_S = 2.0


def count_refusal(code: str | None) -> None:
    """Count a request that the gateway refused, by its error code."""
    reason = code or "none"
    if reason not in _reasons:
        if len(_reasons) >= _MAX_REASONS:
            reason = "other"
        _reasons.add(reason)
    REFUSALS.labels(reason).inc()


def watched(scope: dict[str, Any], send: Send) -> Send:
    """Return `send` that also counts the answer when it begins."""
    surface = _SURFACES.get(scope["path"].lstrip("/").partition("/")[0], "other")
    began_at = time.perf_counter()

    async def counting(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            HTTP_REQUESTS.labels(surface, str(message["status"])).inc()
            HTTP_SECONDS.labels(surface).observe(time.perf_counter() - began_at)
        await send(message)

    return counting


def serve(
    *needs: str, reads_installation: bool = False, is_shared: bool = False
) -> ProbeServer | None:
    """Serve /metrics, /healthz and /readyz; None if LORIKEET_METRICS_PORT is not set.

    needs               the servers that the process needs: names of `readiness.CHECKS`
    reads_installation  whether it also reports readings of the whole installation
    is_shared           whether this process and its children count in files

    Ends the process when the port is taken.
    """
    if not settings.METRICS_PORT:
        return None
    registry: CollectorRegistry = REGISTRY
    if is_shared:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        ProcessCollector(registry=registry)
    if reads_installation:
        registry.register(_Installation())
    address = settings.METRICS_ADDRESS, settings.METRICS_PORT
    try:
        return ProbeServer(
            address,
            metrics=lambda: generate_latest(registry),
            is_alive=liveness.is_alive,
            missing=lambda: readiness.missing(*needs),
        )
    except PortTaken as error:
        raise SystemExit(str(error)) from error


def gauge(
    name: str, documentation: str, values: Iterable[tuple[tuple[str, ...], float]], *labels: str
) -> Metric:
    """Return a gauge with a value for each tuple of labels."""
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


class _Installation(Collector):
    """A collector that runs READINGS when Prometheus asks; a failing one hides no other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Metric] = []
        self._kept_until = 0.0

    def describe(self) -> Iterable[Metric]:
        return ()  # so that the registry does not ask the servers now

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if time.monotonic() >= self._kept_until:
                self._kept = self._read()
                self._kept_until = time.monotonic() + _READINGS_KEPT_S
            yield from self._kept

    def _read(self) -> list[Metric]:
        found: list[Metric] = []
        worked = []
        for name, read in READINGS.items():
            try:
                found += read()
                worked.append(((name,), 1.0))
            except Exception as error:
                log.warning("no metrics of %s: %r", name, error)
                worked.append(((name,), 0.0))
        connection.close()
        about = "Whether the values of this kind could be read; if not, they are left out."
        return [gauge("lorikeet_reading_up", about, worked, "reading"), *found]
