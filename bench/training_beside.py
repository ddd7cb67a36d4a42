"""Serving beside training in one engine, and a night's runs, at a shape with random weights.

`beside` measures, one after the other, with the same arrivals:

    capacity   requests a second when `REQUESTS` come at once
    alone      times to first token at a quarter of that
    trained    tokens a second that the room trains without requests
    beside     both together: the times again, and training's rate

`night` trains 100 runs of 64k tokens (`share` of each) with `BatchTrainer`, from the making of the
weights to the last adapter on the host.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.training_files import config_fields
from bench.training_stack import Shape, Work
from bench.training_trainer import BUDGET, RandomTensors, request_of
from bench.workload import save_random_adapter
from engine import AdapterPart, Engine, EngineConfig, Request, RequestOutput, SamplingParams
from engine.beside.room import BesideConfig, TrainingRoom
from engine.model.config import ModelConfig
from engine.model.weights import build_weights
from engine.training.events import RunEnded, RunProgress
from engine.training.memory import elements_of
from engine.training.model import TrainingModel
from engine.training.trainer import BatchTrainer, TrainerConfig

RUN_TOKENS = 65_536
REQUESTS, LOAD = 256, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What requests are like: prompts and answers in tokens, adapters that they take in turn."""

    prompt: int = 512
    answer: int = 128
    adapters: int = 16
    seconds: float = 40.0
    runs: int = 32


TINY_TRAFFIC = Traffic(prompt=20, answer=8, adapters=2, seconds=1.5, runs=4)


class Line:
    """Requests by their times of arrival, and when each had its first token."""

    def __init__(self, engine: Engine, traffic: Traffic, name: str) -> None:
        self._engine, self._traffic, self._name = engine, traffic, name
        self._due: list[tuple[float, Request]] = []
        self._arrived: dict[str, float] = {}
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self._last: dict[str, float] = {}
        self.began = 0.0

    def fill(self, count: int, rate: float | None) -> None:
        """Poisson arrivals at `rate` a second; None: all at once."""
        chance = random.Random(7)
        generator = torch.Generator().manual_seed(11)
        at, traffic = 0.0, self._traffic
        for number in range(count):
            at += chance.expovariate(rate) if rate else 0.0
            tokens = torch.randint(
                self._engine.model.vocab_size, (traffic.prompt,), generator=generator
            )
            adapter = AdapterPart(digest=f"adapter-{number % traffic.adapters}")
            request = Request(
                request_id=f"{self._name}-{number}",
                token_ids=tokens.tolist(),
                sampling=SamplingParams(
                    max_tokens=traffic.answer, temperature=0.0, ignore_eos=True
                ),
                adapters=(adapter,),
            )
            self._due.append((at, request))
        self._due.reverse()
        self.began = time.perf_counter()

    @property
    def is_done(self) -> bool:
        return not self._due and not self._engine.has_work()

    def receive(self) -> None:
        while self._due and self.began + self._due[-1][0] <= time.perf_counter():
            at, request = self._due.pop()
            self._arrived[request.request_id] = self.began + at
            self._engine.add(request)

    def step(self) -> None:
        self._note(self._engine.step())

    def settle(self) -> None:
        self._note(self._engine.settle())

    def _note(self, outputs: Sequence[RequestOutput]) -> None:
        now = time.perf_counter()
        for output in outputs:
            assert output.error is None, output
            if not output.token_ids:
                continue
            name = output.request_id
            if name in self._arrived:
                self.first_s.append(now - self._arrived.pop(name))
            else:
                self.gaps_s.append(now - self._last[name])
            self._last[name] = now

    def run(self) -> float:
        """Serve all; the seconds that it took."""
        while not self.is_done:
            self.receive()
            if self._engine.has_work():
                self.step()
            else:
                time.sleep(0.0002)
        return time.perf_counter() - self.began

    def times(self) -> dict[str, float]:
        return {
            "ttft_p50_ms": _percentile(self.first_s, 0.5),
            "ttft_p99_ms": _percentile(self.first_s, 0.99),
            "gap_p50_ms": _percentile(self.gaps_s, 0.5),
            "gap_p99_ms": _percentile(self.gaps_s, 0.99),
        }


def _percentile(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3, 1)


@dataclass
class Trained:
    """What the room trained since `began`, second by second of the device."""

    began: float = field(default_factory=time.perf_counter)
    tokens: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    steps: int = 0

    def note(self, events: Sequence[Any]) -> None:
        for event in events:
            assert not isinstance(event, RunEnded), event
            if isinstance(event, RunProgress):
                self.steps += 1
                self.tokens[event.run_id] = event.tokens

    def rate(self, work: Work) -> float:
        """Tokens a second; each step is of as many."""
        return self.steps * work.rows * work.length / (time.perf_counter() - self.began)


def open_engine(shape: Shape, traffic: Traffic, folder: Path, device: str) -> Engine:
    (folder / "config.json").write_text(json.dumps(config_fields(shape)))
    model = ModelConfig.from_fields(config_fields(shape), 2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    gpu = {"max_step_tokens": 2048, "max_running": 256, "reserved_share": 0.2}
    cpu = {"arena_bytes": 256 << 20, "max_step_tokens": 64}
    engine = Engine(
        EngineConfig(
            model_dir=folder,
            device=device,
            prefix_cache=False,  # so that every prompt is computed
            max_context=2048,
            host_cache_bytes=1 << 30,
            lends_weights=True,
            **(gpu if device == "cuda" else cpu),  # type: ignore[arg-type]
        ),
        model=model,
        weights=build_weights(RandomTensors(device, dtype), model),
    )
    files = [
        save_random_adapter(
            folder / f"file-{seed}", model, rank=16, seed=seed, dtype=dtype, device=device
        )
        for seed in range(2)
    ]
    for number in range(traffic.adapters):
        engine.register_adapter(f"adapter-{number}", files[number % 2])
    return engine


def run_beside(name: str, shape: Shape, device: str, options: BesideConfig) -> dict[str, Any]:
    """Measure serving alone, training alone, and both."""
    traffic = Traffic() if device == "cuda" else TINY_TRAFFIC
    # Rows of 256 tokens, eight a step, as elsewhere; a row of the tiny shape has 32.
    work = Work(traffic.runs, 8, 256 if device == "cuda" else 32)
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(shape, traffic, Path(folder), device)
        try:
            return {"case": name, **_beside(engine, shape, traffic, work, options)}
        finally:
            engine.close()


def _beside(
    engine: Engine, shape: Shape, traffic: Traffic, work: Work, options: BesideConfig
) -> dict[str, Any]:
    count = REQUESTS if traffic.runs > 4 else 16
    for warm in ("warm", "capacity"):  # the first loads adapters and compiles
        line = Line(engine, traffic, warm)
        line.fill(count, None)
        seconds = line.run()
    rate = LOAD * count / seconds
    arrivals = max(8, int(rate * traffic.seconds))
    served = Line(engine, traffic, "alone")
    served.fill(arrivals, rate)
    served.run()
    line = Line(engine, traffic, "none")
    room = TrainingRoom(engine, line, options)
    requests = [request_of(i, shape, work, 100_000) for i in range(work.runs)]
    size = elements_of(engine.model, requests[0].settings)
    trainer = room.open([size] * work.runs)
    assert trainer is not None
    for request in requests:
        trainer.add(request)
    for _ in range(3 if traffic.runs <= 4 else 40):
        trainer.step()
    only = train(trainer, until_s=traffic.seconds / 2)
    alone_rate = only.rate(work)
    beside = Line(engine, traffic, "beside")
    room.serve_by(beside)
    beside.fill(arrivals, rate)
    both = Trained()
    while not beside.is_done:
        both.note(trainer.step())
    both_rate = both.rate(work)
    pages = len(engine.lending.pages)
    trainer.close()
    room.close()
    engine.check_integrity()
    p99 = beside.times()["ttft_p99_ms"] / served.times()["ttft_p99_ms"]
    result: dict[str, Any] = {
        "runs": work.runs,
        "requests_s": round(rate, 2),
        "capacity_s": round(rate / LOAD, 2),
        "requests": arrivals,
        "share": options.share,
        "lent_pages": pages,
        "serving_alone": served.times(),
        "serving_beside": beside.times(),
        "ttft_p99_times": round(p99, 2),
        "alone_tok_s": round(alone_rate),
        "tok_s": round(both_rate),
        "training_of_alone": round(both_rate / alone_rate, 3),
    }
    if engine.lending.weights is not None and engine.lending.weights.norm.is_cuda:
        result["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        result["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return result


def train(trainer: BatchTrainer, until_s: float) -> Trained:
    """Train without requests for so long."""
    trained = Trained()
    while time.perf_counter() - trained.began < until_s:
        trained.note(trainer.step())
    return trained


def run_night(
    name: str, shape: Shape, device: str, share: float, *, runs: int = 100, most: int = 64
) -> dict[str, Any]:
    """Train `runs` runs of `share` of 64k tokens to their ends."""
    began = time.perf_counter()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = ModelConfig.from_fields(config_fields(shape), 2)
    model = TrainingModel(config, build_weights(RandomTensors(device, dtype), config))
    work = Work(runs, 8, 256)
    steps = max(1, round(share * RUN_TOKENS / (work.rows * work.length)))
    requests = [request_of(number, shape, work, steps) for number in range(runs)]
    size = elements_of(config, requests[0].settings)
    trainer = BatchTrainer(
        model,
        TrainerConfig(token_budget=BUDGET, max_runs=most, pool_elements=min(runs, most) * size),
    )
    for request in requests:
        trainer.add(request)
    times, ended = [], 0
    while trainer.has_work:
        start = time.perf_counter()
        for event in trainer.step():
            if isinstance(event, RunEnded):
                assert event.outcome == "finished", event
                ended += 1
        times.append(time.perf_counter() - start)
    seconds = time.perf_counter() - began
    assert ended == runs
    tokens = runs * steps * work.rows * work.length
    case: dict[str, Any] = {
        "case": f"{name}: {runs} runs x {tokens // runs // 1024}k tokens, BatchTrainer",
        "runs": runs,
        "tokens": tokens,
        "tok_s": round(tokens / seconds),
        "seconds": round(seconds, 1),
        "step_ms": round(statistics.median(times) * 1e3, 1),
        "slowest_ms": round(max(times) * 1e3, 1),
    }
    if device == "cuda":
        case["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        case["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return case
