"""Time the host's part of a step, without a model: adapters, scheduling, batch building.

    python -m bench.scheduler [--steps 600] [--adapters 2000] [--out FILE]

Every running request decodes with an adapter of its own. *Steady*: the same requests continue.
*Turnover*: in every step the oldest one ends and another begins, with another adapter for the
table. *Crowded*: the same, while as many more wait, half of them batch work, and become overdue.
The arena has no storage; everything else is what the engine uses. Times are medians of the thread's
CPU time in the quietest of fifteen rounds. Each round goes through all sizes, so that other work on
the machine counts little, and the same for each size. Prints a table and one JSON line per case,
writes bench/results/scheduler.json, and exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.machine import environment, write_result
from bench.workload import save_random_adapter
from engine.adapters.base_weights import BaseWeights, PlainWeights
from engine.adapters.files import AdapterReader
from engine.adapters.host_memory import HostMemory
from engine.adapters.loader import LoadLimits
from engine.adapters.store import AdapterStore
from engine.execution.batch import BatchBuilder
from engine.execution.lora_inputs import MAX_ENTRIES
from engine.execution.lora_table import EntryBuffers
from engine.memory.eviction import ReloadCosts
from engine.memory.page_pool import PagePool
from engine.memory.prefix_cache import PrefixCache
from engine.model.config import ModelConfig
from engine.model.plan import Plan
from engine.model.rope import Rotation
from engine.model.weights import Weights
from engine.request import AdapterPart, Priority, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.waiting_queue import SchedulerLimits
from engine.sequence import Sequence, Step
from kernels import PageLayout

RESULTS = Path(__file__).parent / "results" / "scheduler.json"
KINDS = ("steady", "turnover", "crowded")
SIZES = (32, 64, 128, 256, 512)
PROMPT_TOKENS = 64
RANK = 16
ROUNDS = 15

BAR_SIZE = 256
MAX_STEP_MS = 1.5
# The time per request relative to the smallest case; a tenth is allowed for noise of the clock.
MAX_GROWTH = 1.1
MAX_BYTES_PER_ADAPTER = 4096
# A step with all the registered adapters relative to one without; a tenth is allowed for noise.
MAX_SLOWDOWN = 1.1

# As many layers as Llama-3.1-8B, which set the tables' size; narrow, so that loading is quick.
MODEL = ModelConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=1 << 16,
    plan=Plan(eps=1e-5, rotations=(Rotation(theta=10_000.0),) * 32),
    tie_embeddings=True,
    eos_token_ids=(0,),
)
LAYOUT = PageLayout(num_layers=32, num_kv_heads=2, head_dim=16, page_size=16)


@dataclass
class Times:
    """Milliseconds of each step, by stage."""

    poll: list[float] = field(default_factory=list)
    schedule: list[float] = field(default_factory=list)
    build: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        stages = {name: statistics.median(values) for name, values in vars(self).items()}
        steps = sorted(map(sum, zip(*vars(self).values(), strict=True)))
        total = {"step": statistics.median(steps), "p95": steps[int(0.95 * (len(steps) - 1))]}
        return {f"{name}_ms": round(value, 4) for name, value in (total | stages).items()}


# Plain LoRA does not depend on the base's weights.
NO_WEIGHTS = Weights(
    embedding=torch.empty(0), layers=(), norm=torch.empty(0), lm_head=torch.empty(0)
)


class Rig:
    """The engine's host side, with `num_running` decoding requests of as many adapters."""

    def __init__(self, adapter: Path, num_running: int) -> None:
        self._adapter = adapter
        arena = torch.empty(1 << 20, LAYOUT.page_elems, device="meta")
        self._pool = PagePool(arena.shape[0])
        prefixes = PrefixCache(self._pool)
        self.store = AdapterStore(
            reader=AdapterReader(MODEL, LAYOUT, BaseWeights(MODEL, PlainWeights(NO_WEIGHTS))),
            pool=self._pool,
            prefixes=prefixes,
            arena=arena,
            host=HostMemory(arena, 0),
            limits=LoadLimits(num_threads=1),
            costs=ReloadCosts(host=1.0, disk=10.0, prefix=1.0),
        )
        self._scheduler = Scheduler(
            pool=self._pool,
            adapters=self.store,
            prefixes=prefixes,
            page_size=LAYOUT.page_size,
            limits=SchedulerLimits(
                max_running=num_running,
                max_step_tokens=num_running + 2 * PROMPT_TOKENS,
                max_wait_s=0.05,
                max_batch_wait_s=0.2,
            ),
            let_pinned_go=lambda: False,
        )
        self._builder = BatchBuilder(
            store=self.store,
            page_size=LAYOUT.page_size,
            device="cpu",
            adapter_order=lambda _: {},  # as on a GPU; a CPU's kernels have an order of their own
            buffers=EntryBuffers(MAX_ENTRIES, torch.device("cpu")),
            has_row_tables=False,
        )
        self._num_arrivals = 0
        for i in range(num_running):
            self.store.register(f"{i:064x}", adapter)
            self._add(f"{i:064x}")
        while len(self._scheduler.running) < num_running or self._is_prefilling():
            self.step(Times())
            self.store.wait(0.01)

    def step(self, times: Times) -> None:
        """One iteration as `Engine.step` does it; the model's token is always 1."""
        start = time.thread_time()
        self.store.poll(self._scheduler.wanted_adapters())
        polled = time.thread_time()
        step = self._scheduler.schedule(start)
        scheduled = time.thread_time()
        if step.rows:
            self._builder.build(step)
        built = time.thread_time()
        self._commit(step)
        end = time.thread_time()
        times.poll.append(1e3 * (polled - start))
        times.schedule.append(1e3 * (scheduled - polled))
        times.build.append(1e3 * (built - scheduled))
        times.commit.append(1e3 * (end - built))

    def crowd(self) -> None:
        """Add as many requests again, which wait."""
        for i, running in enumerate(list(self._scheduler.running)):
            self._add(running.digests[0], Priority.BATCH if i % 2 else Priority.INTERACTIVE)

    def turn_over(self) -> None:
        """End the oldest request, and add one that needs the same adapter."""
        oldest = self._scheduler.running[0]
        self._scheduler.remove(oldest)
        self.store.remove_user(oldest.digests)
        self._add(oldest.digests[0])

    def close(self) -> None:
        self._scheduler.check_integrity()
        self.store.check_integrity()
        self.store.close()

    def _commit(self, step: Step) -> None:
        for row in step.rows:
            samples = row.samples
            self._scheduler.commit(row)
            if samples:
                row.sequence.token_ids.append(1)

    def _is_prefilling(self) -> bool:
        return any(sequence.num_uncomputed > 1 for sequence in self._scheduler.running)

    def _add(self, digest: str, priority: Priority = Priority.INTERACTIVE) -> None:
        arrival, self._num_arrivals = self._num_arrivals, self._num_arrivals + 1
        request = Request(
            request_id=str(arrival),
            # Prompts of different lengths, so that in every step some pages become full.
            token_ids=[1] * (PROMPT_TOKENS - arrival % LAYOUT.page_size),
            sampling=SamplingParams(),
            adapters=(AdapterPart(digest=digest),),
            priority=priority,
        )
        sequence = Sequence(request, arrival)
        self.store.add_user(sequence.digests)
        self._scheduler.add(sequence, time.thread_time())


def measure_steps(adapter: Path, sizes: tuple[int, ...], num_steps: int) -> list[dict[str, Any]]:
    """Measure each kind of case at every size."""
    cases = []
    rigs = [Rig(adapter, size) for size in sizes]
    for kind in KINDS:
        if kind == "crowded":
            for rig in rigs:
                rig.crowd()
        rounds = [[_round(rig, kind, num_steps // ROUNDS) for rig in rigs] for _ in range(ROUNDS)]
        for size, own in zip(sizes, zip(*rounds, strict=True), strict=True):
            quietest = min(own, key=lambda medians: medians["step_ms"])
            cases.append({"case": kind, "running": size, **quietest})
    for rig in rigs:
        rig.close()
    return cases


def _round(rig: Rig, kind: str, num_steps: int) -> dict[str, float]:
    times = Times()
    for _ in range(num_steps):
        if kind != "steady":
            rig.turn_over()
        rig.step(times)
    return times.medians()


def measure_registry(adapter: Path, folder: Path, count: int, size: int) -> dict[str, Any]:
    """Measure the memory of `count` unused registered adapters, and their cost to a step."""
    rig = Rig(adapter, size)
    before = _steady_ms(rig)
    links = _links(adapter, folder, count)
    gc.collect()
    tracemalloc.start()
    for i, path in enumerate(links):
        rig.store.register(f"{1 << 32 | i:064x}", path)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    after = _steady_ms(rig)
    rig.close()
    return {
        "adapters": count,
        "running": size,
        "bytes_each": round(held / count),
        "step_ms_before": round(before, 4),
        "step_ms_after": round(after, 4),
    }


def _links(adapter: Path, folder: Path, count: int) -> Iterator[Path]:
    """Yield `count` folders with links to the same adapter."""
    for i in range(count):
        path = folder / f"adapter-{i}"
        path.symlink_to(adapter, target_is_directory=True)
        yield path


def _steady_ms(rig: Rig) -> float:
    return min(_round(rig, "steady", 40)["step_ms"] for _ in range(ROUNDS))


def judge(cases: list[dict[str, Any]], registry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each bar its name, the figure, its limit, and whether it holds."""
    bars: list[tuple[str, float, float]] = []
    for kind in KINDS:
        own = [case for case in cases if case["case"] == kind]
        bars += [
            (f"{kind}: ms per step, {case['running']} running", case["step_ms"], MAX_STEP_MS)
            for case in own
            if case["running"] == BAR_SIZE
        ]
        bars += [
            (
                f"{kind}: growth from {own[0]['running']} to {more['running']}",
                more["step_ms"] / own[0]["step_ms"],
                MAX_GROWTH * more["running"] / own[0]["running"],
            )
            for more in own[1:]
        ]
    bars.append(("bytes per registered adapter", registry["bytes_each"], MAX_BYTES_PER_ADAPTER))
    slowdown = registry["step_ms_after"] / registry["step_ms_before"]
    bars.append(("a step with them to one without", slowdown, MAX_SLOWDOWN))
    return [
        {"bar": name, "value": round(value, 3), "at_most": most, "passed": value <= most}
        for name, value, most in bars
    ]


def run(sizes: tuple[int, ...], num_steps: int, num_adapters: int, size: int) -> dict[str, Any]:
    """Run all cases, the registry's with `size` running requests, and check the bars."""
    with tempfile.TemporaryDirectory() as folder:
        adapter = save_random_adapter(Path(folder) / "adapter", MODEL, rank=RANK, seed=0)
        cases = measure_steps(adapter, sizes, num_steps)
        registry = measure_registry(adapter, Path(folder), num_adapters, size)
    return {"cases": cases, "registry": registry, "bars": judge(cases, registry)}


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the host side of a step, without a model.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    result = environment("bench.scheduler")
    result.update(run(SIZES, args.steps, args.adapters, BAR_SIZE))
    for case in (*result["cases"], result["registry"]):
        print(json.dumps(case))
    print(f"\n{'':40}{'value':>10}{'at most':>10}")
    for bar in result["bars"]:
        verdict = "" if bar["passed"] else "  MISSED"
        print(f"{bar['bar']:40}{bar['value']:10.3f}{bar['at_most']:10.1f}{verdict}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, result)
    return 0 if all(bar["passed"] for bar in result["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
