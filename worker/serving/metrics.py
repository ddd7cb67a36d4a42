"""WorkerMetrics: what a worker counts, for Prometheus. docs/metrics.md has the list.

Requests are noted as they end; all else is read from the worker's state when Prometheus asks, so
that nothing of this runs in a step of the engine. No label names a tenant or an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from contract.adapters.probe_server import ProbeServer
from contract.messages.protocol import (
    HEARTBEAT_TIMEOUT_S,
    DoneRecord,
    ErrorCode,
    FinishReason,
    Tier,
)
from engine.drafts.profile import Source
from engine.stats import (
    Distribution,
    DraftCounts,
    EngineStats,
    LoadCounts,
    Precision,
    PreemptionCause,
)

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKEN_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1, 2, 5)
disable_created_metrics()  # type: ignore[no-untyped-call]  # half of all series, and of no use here

#: Seconds of silence after which the loop of heartbeats counts as stuck.
SILENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """The state of a worker that Prometheus asks for.

    silent_s   seconds since the loop of heartbeats turned
    heard_s    seconds since Redis took a heartbeat
    downloads  adapters brought to the disk
    prefetches how many prefetches ended, by outcome
    trials     grammars that were compiled for the first time, and the CPU seconds
    """

    stats: EngineStats = field(default_factory=EngineStats)
    is_loaded: bool = False
    is_draining: bool = False
    silent_s: float = 0.0
    heard_s: float = 0.0
    downloads: LoadCounts = field(default_factory=LoadCounts)
    trials: LoadCounts = field(default_factory=LoadCounts)
    prefetches: Mapping[str, int] = field(default_factory=dict)
    prefix_pins: Mapping[str, int] = field(default_factory=dict)
    redis_errors: int = 0

    @property
    def missing(self) -> list[str]:
        """Return what keeps the worker from taking requests."""
        lacks = {
            "engine": not self.is_loaded,
            "redis": self.heard_s > HEARTBEAT_TIMEOUT_S,
            "room: it drains": self.is_draining,
        }
        return [name for name, is_missing in lacks.items() if is_missing]


class WorkerMetrics:
    """Owns the registry of one worker."""

    def __init__(self, state: Callable[[], WorkerState]) -> None:
        self._state = state
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        self._registry.register(_OfState(state))
        self._requests = self._counter(
            "requests", "Requests that have ended.", "outcome", "priority"
        )
        for outcome in FinishReason:  # else the first of each would not show as an increase
            for priority in ("interactive", "batch"):
                self._requests.labels(outcome.value, priority)
        self._errors = self._counter("request_errors", "Requests that ended in an error.", "reason")
        for code in ErrorCode:
            self._errors.labels(code.value)
        self._prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self._cached = self._counter(
            "cached_prompt_tokens", "Of these, tokens whose KV was found in the prefix cache."
        )
        self._generated = self._counter("generated_tokens", "Tokens of answers.")
        self._queue = self._histogram(
            "request_queue_seconds", "From the gateway to the engine.", _SECONDS, "priority"
        )
        self._load = self._histogram(
            "request_adapter_seconds", "Wait for the adapter's files.", _SECONDS
        )
        self._tiers = self._counter(
            "adapter_requests", "Requests by where their slowest adapter was found.", "tier"
        )
        for tier in Tier:
            self._tiers.labels(tier.value)
        self._first = self._histogram(
            "time_to_first_token_seconds", "From the gateway to the first token.", _SECONDS,
            "priority",
        )  # fmt: skip
        self._token = self._histogram(
            "time_per_token_seconds", "Of each token after the first.", _TOKEN_SECONDS
        )
        self._whole = self._histogram("request_seconds", "To the last token.", _SECONDS)

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"lorikeet_{name}", about, labels, registry=self._registry)

    def _histogram(
        self, name: str, about: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"lorikeet_{name}", about, labels, buckets=buckets, registry=self._registry
        )

    def note_end(self, record: DoneRecord) -> None:
        """Note a request that has ended."""
        priority = "batch" if record.is_batch else "interactive"
        self._requests.labels(record.finish_reason, priority).inc()
        if record.error_code is not None:
            self._errors.labels(record.error_code).inc()
        self._prompt.inc(record.prompt_tokens)
        self._cached.inc(record.cached_tokens)
        self._generated.inc(record.completion_tokens)
        self._queue.labels(priority).observe(record.queue_ms / 1000)
        if record.digests:
            self._load.observe(record.load_ms / 1000)
        if record.tier is not None:
            self._tiers.labels(record.tier).inc()
        self._whole.observe(record.total_ms / 1000)
        if record.first_token_ms is not None:
            self._first.labels(priority).observe(record.first_token_ms / 1000)
            if record.completion_tokens > 1:
                generating_s = max(0.0, record.total_ms - record.first_token_ms) / 1000
                self._token.observe(generating_s / (record.completion_tokens - 1))

    def serve(self, address: tuple[str, int]) -> None:
        """Serve /metrics, /healthz and /readyz from a thread. Raises PortTaken."""
        ProbeServer(
            address,
            metrics=self.text,
            is_alive=lambda: self._state().silent_s < SILENCE_S,
            missing=lambda: self._state().missing,
        )

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._registry)


class _OfState(Collector):
    def __init__(self, state: Callable[[], WorkerState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        stats = state.stats
        yield _gauge("worker_loaded", "Whether the engine has loaded.", float(state.is_loaded))
        yield _gauge("worker_draining", "Whether it takes no more.", float(state.is_draining))
        yield _gauge("worker_heard_seconds", "Since Redis took its last heartbeat.", state.heard_s)
        yield _counter("redis_errors", "Commands that Redis did not answer.", state.redis_errors)
        yield from _of_engine(stats)
        yield _pages(stats)
        yield from _loads(state.downloads, stats)
        for name, about, counts in (
            ("prefetches", "Adapters asked for before a request.", state.prefetches),
            ("prefix_pins", "System prompts asked to be kept.", state.prefix_pins),
        ):
            outcomes = CounterMetricFamily(f"lorikeet_{name}", about, labels=["outcome"])
            for outcome, count in counts.items():
                outcomes.add_metric([outcome], count)
            yield outcomes
        yield SummaryMetricFamily(
            "lorikeet_grammar_compile_seconds",
            "Processor time of grammars that were compiled for the first time.",
            count_value=state.trials.loads,
            sum_value=state.trials.seconds,
        )
        yield _counter(
            "grammars_refused", "Of these, grammars that cannot be used.", state.trials.failures
        )


def _of_engine(stats: EngineStats) -> Iterator[Metric]:
    yield _counter("engine_steps", "Steps.", stats.step)
    yield _counter(
        "training_seconds", "Of the device, for training beside requests.", stats.trained_seconds
    )
    yield _gauge("engine_max_running_requests", "That run at a time.", stats.max_running)
    requests = _labelled("engine_requests", "Requests in the engine.", "state")
    requests.add_metric(["running"], stats.running)
    requests.add_metric(["waiting"], stats.waiting)
    yield requests
    adapters = _labelled("engine_adapters", "Adapters by where they are.", "state")
    adapters.add_metric(["resident"], len(stats.resident_digests))
    adapters.add_metric(["host"], len(stats.host_digests))
    adapters.add_metric(["pinned"], len(stats.pinned_digests))
    adapters.add_metric(["registered"], stats.num_adapters)
    yield adapters
    preemptions = CounterMetricFamily(
        "lorikeet_preemptions", "Times that running requests lost their pages.", labels=["cause"]
    )
    for cause in PreemptionCause:
        preemptions.add_metric([cause.value], stats.preemptions.get(cause, 0))
    yield preemptions
    drafts = CounterMetricFamily(
        "lorikeet_drafts", "Drafted tokens that were verified.", labels=["source", "outcome"]
    )
    for source in Source:
        counts = stats.drafts.get(source.value, DraftCounts())
        drafts.add_metric([source.value, "accepted"], counts.accepted)
        drafts.add_metric([source.value, "rejected"], counts.drafted - counts.accepted)
    yield drafts
    yield from _of_precision(stats.precision)
    if stats.step_rows is not None:
        yield _histogram("engine_step_rows", "Rows of a step.", stats.step_rows)
    if stats.step_seconds is not None:
        yield _histogram("engine_step_seconds", "Time of a step.", stats.step_seconds)


def _of_precision(precision: Precision) -> Iterator[Metric]:
    kl = _labelled("precision_kl", "Nats per token from the base before it was quantised.", "kind")
    agreement = _labelled("precision_agreement", "Share of tokens with the same likeliest.", "kind")
    error = _labelled("precision_logit_error", "The largest difference of two logits.", "kind")
    for kind, found in precision.kinds.items():
        kl.add_metric([kind], found.kl)
        agreement.add_metric([kind], found.agreement)
        error.add_metric([kind], found.logit_error)
    yield from (kl, agreement, error)


def _pages(stats: EngineStats) -> Metric:
    """Return the arena's pages; the uses add up to all of them."""
    pages = _labelled("pages", "Pages of the arena, by what they hold.", "use")
    for use, count in (
        ("kv", stats.kv_pages),
        ("adapter", stats.adapter_pages),
        ("pinned", stats.pinned_pages),
        ("lent", stats.lent_pages),
        ("cached", stats.cached_pages),
        ("free", stats.free_pages - stats.cached_pages),
    ):
        pages.add_metric([use], count)
    return pages


def _loads(downloads: LoadCounts, stats: EngineStats) -> Iterator[Metric]:
    seconds = SummaryMetricFamily(
        "lorikeet_adapter_load_seconds",
        "Loads of adapters to the disk, to host memory and to the arena.",
        labels=["tier"],
    )
    failures = CounterMetricFamily(
        "lorikeet_adapter_load_failures", "Loads that failed.", labels=["tier"]
    )
    for tier, counts in {"disk": downloads, **stats.adapter_loads}.items():
        seconds.add_metric([tier], count_value=counts.loads, sum_value=counts.seconds)
        failures.add_metric([tier], counts.failures)
    yield seconds
    yield failures


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"lorikeet_{name}", about, value=value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"lorikeet_{name}", about, value=value)


def _labelled(name: str, about: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"lorikeet_{name}", about, labels=[label])


def _histogram(name: str, about: str, values: Distribution) -> Metric:
    so_far, buckets = 0, []
    for bound, count in zip([*map(str, values.bounds), "+Inf"], values.counts, strict=True):
        so_far += count
        buckets.append((bound, so_far))
    return HistogramMetricFamily(f"lorikeet_{name}", about, buckets=buckets, sum_value=values.total)
