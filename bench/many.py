"""Run S-LoRA's workload: what 2000 registered adapters cost compared with 5 and with none.

    python -m bench.many                        # one GPU, Llama-3.1-8B's shape
    python -m bench.many --shape tiny --device cpu --seconds 2 --rate 40 --registered 50

Lengths, arrivals and popularity are as in `bench.workload.slora_trace`; adapters are as in S-LoRA's
S1: rank 8 on q, k, v and o (--rank and --projections change that).

*Throughput*: more requests arrive than can be served; the figure counts the tokens generated in the
last two thirds of --seconds. As in S-LoRA's runs, adapters are in host memory: those of the trace
have been used once before.

*Latency*: the time to first token at a rate that can be served: when all registered adapters stay
resident, and when 16 times as many are registered as the whole arena could hold without KV. "Cold":
nothing is loaded before. "Overcommitted": the trace's adapters have been used once and then evicted
by others, so that they are in host memory only.

The adapters' files are few (--files) and are registered under many digests; each digest has its own
pages and its own packed adapter in host memory. Prints one JSON line per case.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.device import provenance
from bench.machine import write_result
from bench.workload import SHAPES, Arrival, random_weights, save_random_adapter, slora_trace
from engine import (
    AdapterPart,
    Engine,
    EngineConfig,
    EngineError,
    Request,
    RequestOutput,
    SamplingParams,
)
from engine.model.config import ModelConfig

WARM_SHARE = 1 / 3
# The targets: (case, compared with, figure, bar).
BARS = (
    ("many", "few", "tok_s", ">=", 0.95),
    ("many", "none", "tok_s", ">=", 0.9),
    ("overcommitted", "resident", "ttft_p99_ms", "<=", 2.0),
)


@dataclass
class Load:
    """The measurements of one trace on an engine."""

    ttft_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_tokens: int = 0
    num_ended: int = 0
    num_steps: int = 0
    running: int = 0

    def count(self, running: int, outputs: list[RequestOutput]) -> None:
        """Add a step with `running` running requests; raise a request's error."""
        self.num_steps += 1
        self.running += running
        for output in outputs:
            if output.error is not None:
                raise output.error
            self.num_tokens += len(output.token_ids)
            self.num_ended += output.finish_reason is not None

    def figures(self) -> dict[str, Any]:
        ttft = sorted(self.ttft_ms)
        return {
            "tok_s": round(self.num_tokens / self.seconds),
            "req_s": round(self.num_ended / self.seconds, 2),
            "requests": len(ttft),
            "ttft_p50_ms": round(statistics.median(ttft), 1),
            "ttft_p99_ms": round(ttft[int(0.99 * (len(ttft) - 1))], 1),
            "ms_step": round(1e3 * self.seconds / max(self.num_steps, 1), 2),
            "mean_running": round(self.running / max(self.num_steps, 1), 1),
        }


class Bench:
    """Random weights and some adapter files, for engines with different arenas."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device: str = arguments.device
        self.dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        self._folder = Path(tempfile.mkdtemp(prefix="bench-many-"))
        (self._folder / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
        self.model = ModelConfig.from_fields(SHAPES[arguments.shape], None)
        self._weights = random_weights(self.model, self.device, self.dtype)
        self._files = [
            save_random_adapter(
                self._folder / f"adapter-{i}",
                self.model,
                rank=arguments.rank,
                seed=i,
                projections=arguments.projections,
                dtype=self.dtype,
                device=self.device,
            )
            for i in range(arguments.files)
        ]
        widths = self.model.projection_widths
        self.adapter_bytes = (
            self.model.num_layers
            * arguments.rank
            * sum(sum(widths[p]) for p in arguments.projections)
            * self.dtype.itemsize
        )

    def engine(self, num_adapters: int, arena_bytes: int | None) -> Engine:
        """Make an engine with `num_adapters` adapters, named 0, 1, 2 ... by popularity."""
        config = EngineConfig(
            prefix_cache=False,  # so that every request is computed
            model_dir=self._folder,
            device=self.device,
            dtype="float32" if self.device == "cpu" else "bfloat16",
            arena_bytes=arena_bytes,
            host_cache_bytes=int(self.arguments.host_cache_gb * 1e9),
            max_running=self.arguments.max_running,
            max_step_tokens=self.arguments.max_step_tokens,
            max_context=1024,
            loader_threads=self.arguments.loader_threads,
        )
        engine = Engine(config, weights=self._weights)
        for i in range(num_adapters):
            engine.register_adapter(str(i), self._files[i % len(self._files)])
        gc.collect()
        gc.freeze()
        return engine

    def warm_up(self, engine: Engine, adapters: list[int]) -> None:
        """Compile what steps need, and load these adapters."""
        lengths = [400, *[8] * max(len(adapters), 2)]
        who = [*adapters[:1], *adapters] or [-1] * len(lengths)
        trace = [Arrival(0.0, n, 4, a) for n, a in zip(lengths, itertools.cycle(who), strict=False)]
        drive(engine, trace, 600.0, use_adapters=bool(adapters), until_done=True)

    def load(self, engine: Engine, trace: list[Arrival], seconds: float) -> float:
        """Use once each adapter that the trace's first seconds need, the most popular last."""
        started = time.perf_counter()
        used = sorted({arrival.adapter for arrival in trace if arrival.at < seconds})
        self.warm_up(engine, used[::-1])
        return round(time.perf_counter() - started, 1)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def drive(
    engine: Engine,
    trace: list[Arrival],
    seconds: float,
    *,
    use_adapters: bool,
    warm: float = 0.0,
    until_done: bool = False,
) -> Load:
    """Run `trace` for `seconds` (or until all have ended), then cancel the rest.

    warm  seconds at the beginning that do not count
    """
    load, arrived, told = Load(), dict[str, float](), set[str]()
    pending = deque(enumerate(trace))
    started = counted_from = time.perf_counter()
    while (now := time.perf_counter()) - started < seconds:
        while pending and pending[0][1].at <= now - started:
            number, arrival = pending.popleft()
            arrived[str(number)] = started + arrival.at
            engine.add(_request(str(number), arrival, engine.model.vocab_size, use_adapters))
        if not engine.has_work():
            if not pending:
                break
            time.sleep(max(0.0, min(started + pending[0][1].at - now, 0.01)))
            continue
        outputs = engine.step()
        now = time.perf_counter()
        first = [o.request_id for o in outputs if o.token_ids and o.request_id not in told]
        told.update(first)
        if now - started < warm:
            counted_from = now
        else:
            load.ttft_ms += [1e3 * (now - arrived[request_id]) for request_id in first]
            load.count(engine.stats().running, outputs)
        if until_done and not pending and not engine.has_work():
            break
    load.seconds = time.perf_counter() - counted_from
    for request_id in arrived:
        engine.cancel(request_id)
    while engine.has_work():
        engine.step()
    return load


def _request(name: str, arrival: Arrival, vocab_size: int, use_adapters: bool) -> Request:
    tokens = [(7 * i + 13 * int(name) + 1) % vocab_size for i in range(arrival.prompt)]
    return Request(
        request_id=name,
        token_ids=tokens,
        sampling=SamplingParams(max_tokens=arrival.new, temperature=0.0, ignore_eos=True),
        adapters=(AdapterPart(digest=str(arrival.adapter)),) if use_adapters else (),
    )


def throughput(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measure the saturated cases: no adapters, 5, and as many as --registered."""
    arguments = bench.arguments
    arena = None if arguments.arena_gb is None else int(arguments.arena_gb * 1e9)
    started = time.perf_counter()
    engine = bench.engine(arguments.registered, arena)
    start_s = round(time.perf_counter() - started, 1)
    bench.warm_up(engine, [])
    bench.warm_up(engine, list(range(5)))
    base = 0
    for name, count in (("none", 0), ("few", 5), ("many", arguments.registered)):
        trace = slora_trace(
            int(arguments.rate * arguments.seconds * 1.5) + 10,
            rate=arguments.rate,
            adapters=count,
            longest=arguments.longest,
        )
        load_s = bench.load(engine, trace, arguments.seconds) if count else 0.0
        load = drive(
            engine,
            trace,
            arguments.seconds,
            use_adapters=count > 0,
            warm=WARM_SHARE * arguments.seconds,
        )
        case = {"case": name, "adapters": count, "rate": arguments.rate, **load.figures()}
        base = base or case["tok_s"]
        case["resident"] = len(engine.stats().resident_digests)
        case["base_ratio"] = round(case["tok_s"] / base, 3)
        yield case | {"start_s": start_s, "load_s": load_s}
    engine.close()


def latency(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measure time to first token with all adapters resident, and with 16 times more than fit."""
    arguments = bench.arguments
    arena = int(arguments.kv_gb * 1e9) + arguments.fitting * bench.adapter_bytes
    fit = arena // bench.adapter_bytes
    engine = bench.engine(16 * fit, arena)
    for name in ("resident", "cold", "overcommitted"):
        count = arguments.fitting if name == "resident" else 16 * fit
        bench.warm_up(engine, list(range(arguments.fitting)))
        rate = arguments.latency_rate
        trace = slora_trace(
            int(rate * arguments.latency_seconds * 1.5) + 10,
            rate=rate,
            adapters=count,
            longest=arguments.longest,
            seed=1,
        )
        if name == "overcommitted":
            bench.load(engine, trace, arguments.latency_seconds)
            used = {arrival.adapter for arrival in trace}
            others = (a for a in range(count) if a not in used)
            bench.warm_up(engine, list(itertools.islice(others, fit)))
        load = drive(engine, trace, arguments.latency_seconds, use_adapters=True)
        case = {"case": name, "adapters": count, "rate": rate, **load.figures()}
        case["resident"] = len(engine.stats().resident_digests)
        yield case | {"arena_gb": round(arena / 1e9, 2)}
    engine.close()


def judge(cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of the bars whose cases were run."""
    bars = []
    for case, other, figure, relation, bar in BARS:
        if case in cases and other in cases:
            ratio = cases[case][figure] / cases[other][figure]
            bars.append(
                {
                    "bar": f"{figure}: {case} to {other}",
                    "value": round(ratio, 3),
                    relation: bar,
                    "passed": ratio >= bar if relation == ">=" else ratio <= bar,
                }
            )
    return bars


def run(
    arguments: argparse.Namespace, save: Callable[[dict[str, Any]], None] = lambda report: None
) -> dict[str, Any]:
    """Run all cases and check the bars; print each case when it has run.

    save  called with the report so far after each case
    """
    host = provenance(arguments.device)
    bench = Bench(arguments)
    constant = {
        "kind": "many",
        "batch": arguments.max_running,
        "rank": arguments.rank,
        "projections": len(arguments.projections),
        "files": arguments.files,
        "seconds": arguments.seconds,
    }
    constant |= {key: host[key] for key in host if key != "matmul_tflop_s"}
    report: dict[str, Any] = {"host": host, "results": [], "bars": []}
    parts = {"throughput": throughput, "latency": latency}
    try:
        for name in arguments.only:
            for case in parts[name](bench):
                case |= constant
                if arguments.device != "cpu":
                    case["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
                print(json.dumps(case), flush=True)
                report["results"].append(case)
                report["bars"] = judge({each["case"]: each for each in report["results"]})
                save(report)
            gc.unfreeze()
            gc.collect()
            if arguments.device != "cpu":
                torch.cuda.empty_cache()
    except EngineError as error:
        print(f"stopped: {error.message}", file=sys.stderr)
        raise
    finally:
        bench.close()
    return report


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="S-LoRA's workload of many adapters.")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=["throughput", "latency"])
    parser.add_argument("--seconds", type=float, default=12.0, help="of a throughput case")
    parser.add_argument("--latency-seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=90.0, help="requests/s, more than it serves")
    parser.add_argument("--latency-rate", type=float, default=10.0)
    parser.add_argument("--registered", type=int, default=2000)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--projections", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--files", type=int, default=8, help="different adapter files")
    parser.add_argument("--fitting", type=int, default=32, help="adapters that are always resident")
    parser.add_argument("--kv-gb", type=float, default=2.0, help="KV in the latency cases' arena")
    parser.add_argument("--arena-gb", type=float, help="the other cases' arena; default: what fits")
    parser.add_argument("--host-cache-gb", type=float, default=16.0)
    parser.add_argument("--loader-threads", type=int, default=8)
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--max-step-tokens", type=int, default=512)
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt or an answer")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    return parser.parse_args(argv)


def main() -> int:
    arguments = parse()

    def save(report: dict[str, Any]) -> None:
        if arguments.out:
            report["command"] = "python -m bench.many " + " ".join(sys.argv[1:])
            write_result(arguments.out, report)

    result = run(arguments, save)
    for bar in result["bars"]:
        print(json.dumps(bar))
    return 0 if all(bar["passed"] for bar in result["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
