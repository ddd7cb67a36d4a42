"""Measure milliseconds to the first token by where the adapter is: arena, host memory or disk.

    python -m bench.first_token [--shape llama-3.1-8b] [--device cuda] [--out FILE]

One request at a time on an idle engine, with prompts of 32 tokens and rank-16 adapters on all seven
projections, used in turn. The tier follows from how many of them the arena and the host memory
hold: all; one in the arena and all in host memory; one in each. Files are verified as in a worker,
and are in the operating system's page cache. It also measures the speed of copying an adapter's
pages to the GPU, and of one plain copy from pinned memory.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.device import provenance
from bench.machine import write_result
from bench.workload import SHAPES, random_weights, save_random_adapter
from engine import AdapterPart, Engine, EngineConfig, Request, SamplingParams
from engine.adapters.base_weights import BaseWeights, PlainWeights
from engine.adapters.copies import PageCopier
from engine.adapters.files import AdapterReader
from engine.adapters.host_memory import HostMemory
from engine.adapters.pages import Place
from engine.model.config import ModelConfig
from engine.model.weights import Weights

NUM_ADAPTERS, RANK, PROMPT_TOKENS = 6, 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place of adapters: how many of them the arena and the host memory hold."""

    name: str
    in_arena: int
    in_host: int


TIERS = (
    Tier(name="resident", in_arena=NUM_ADAPTERS, in_host=NUM_ADAPTERS),
    Tier(name="host", in_arena=1, in_host=NUM_ADAPTERS),
    Tier(name="disk", in_arena=1, in_host=1),
)


def digest_of(config_text: bytes, tensors_sha256: str) -> str:
    return hashlib.sha256(config_text + tensors_sha256.encode()).hexdigest()


class Rig:
    """A model with random weights and adapter files, which the engines of all tiers share."""

    def __init__(self, shape: str, device: str, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
        self.model = ModelConfig.from_fields(SHAPES[shape], None)
        self.is_cpu = device == "cpu"
        self.config = EngineConfig(
            model_dir=folder,
            device=device,
            dtype="float32" if self.is_cpu else "bfloat16",
            max_running=2,
            max_context=1024,
            prefix_cache=False,
        )
        dtype = torch.float32 if self.is_cpu else torch.bfloat16
        self.weights: Weights = random_weights(self.model, device, dtype)
        self.paths: dict[str, Path] = {}
        for seed in range(NUM_ADAPTERS):
            path = save_random_adapter(
                folder / str(seed), self.model, rank=RANK, seed=seed, dtype=dtype, device=device
            )
            with (path / "adapter_model.safetensors").open("rb") as file:
                tensors = hashlib.file_digest(file, "sha256").hexdigest()
            text = (path / "adapter_config.json").read_bytes()
            self.paths[digest_of(text, tensors)] = path
        layout = self.config.page_layout(self.model)
        base = BaseWeights(self.model, PlainWeights(self.weights))
        self.reader = AdapterReader(self.model, layout, base, digest_of)
        plan = self.reader.read_plan(next(iter(self.paths.values())))
        self.num_pages = self.reader.place(plan).num_pages
        self.page_bytes = self.config.page_bytes(self.model)

    def engine(self, tier: Tier) -> Engine:
        adapter_bytes = self.num_pages * self.page_bytes
        changes: dict[str, Any] = {
            "arena_bytes": (NUM_ADAPTERS + 1) * adapter_bytes + 64 * self.page_bytes,
            "max_adapter_bytes": tier.in_arena * adapter_bytes,
            "host_cache_bytes": tier.in_host * adapter_bytes,
        }
        fields = {name: getattr(self.config, name) for name in self.config.__slots__}
        engine = Engine(
            EngineConfig(**{**fields, **changes}), weights=self.weights, digest_of=digest_of
        )
        for digest, path in self.paths.items():
            engine.register_adapter(digest, path)
        gc.collect()
        gc.freeze()
        return engine


def first_token_ms(engine: Engine, digest: str | None) -> float:
    """Return the time from `add` until the step with the first token returns."""
    tokens = torch.randint(0, engine.model.vocab_size, (PROMPT_TOKENS,)).tolist()
    adapters = () if digest is None else (AdapterPart(digest=digest),)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    request = Request(request_id="r", token_ids=tokens, sampling=sampling, adapters=adapters)
    started = time.perf_counter()
    engine.add(request)
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                raise output.error
    return 1e3 * (time.perf_counter() - started)


def measure_tier(rig: Rig, tier: Tier, rounds: int) -> list[dict[str, Any]]:
    """Measure the first token of the base and of the tier's adapters, on one engine."""
    engine = rig.engine(tier)
    digests = list(rig.paths)
    cases = []
    try:
        for name in ("base", tier.name):
            times = []
            for i in range((rounds + 1) * NUM_ADAPTERS):
                digest = None if name == "base" else digests[i % NUM_ADAPTERS]
                if name == "host" and i >= NUM_ADAPTERS:
                    assert digest not in engine.stats().resident_digests
                times.append(first_token_ms(engine, digest))
            times = times[NUM_ADAPTERS:]  # the first round compiles and fills the tiers
            cases.append(
                {
                    "case": name,
                    "engine": tier.name,
                    "ttft_ms": round(statistics.median(times), 2),
                    "best_ms": round(min(times), 2),
                    "worst_ms": round(max(times), 2),
                }
            )
        cases[1]["added_ms"] = round(cases[1]["ttft_ms"] - cases[0]["ttft_ms"], 2)
    finally:
        engine.close()
    return cases


def measure_bus(rig: Rig, rounds: int = 20) -> dict[str, Any]:
    """Measure GB/s of copying an adapter to scattered pages, and of one copy of as many bytes."""
    digest, path = next(iter(rig.paths.items()))
    num_bytes = rig.num_pages * rig.page_bytes
    elems = rig.config.page_layout(rig.model).page_elems
    arena = torch.zeros(4 * rig.num_pages, elems, dtype=torch.bfloat16, device="cuda")
    host = HostMemory(arena, 2 * num_bytes)
    room = host.take(rig.num_pages)
    rig.reader.load(digest, path, room)
    memory, copier = room.open(), PageCopier(arena)
    neighbours = list(range(rig.num_pages))
    scattered = [3 * page for page in neighbours]

    def plain() -> None:
        arena[: rig.num_pages].copy_(memory[: rig.num_pages], non_blocking=True)

    def seconds(copy: Any) -> float:
        times = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            started = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    figures = {
        "plain_gb_s": seconds(plain),
        "neighbours_gb_s": seconds(lambda: copier.start(room, Place(neighbours, []))),
        "scattered_gb_s": seconds(lambda: copier.start(room, Place(scattered, []))),
    }
    case = {name: round(num_bytes / time_s / 1e9, 1) for name, time_s in figures.items()}
    return {"case": "bus", **case, "share": round(case["scattered_gb_s"] / case["plain_gb_s"], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write host and results as JSON")
    args = parser.parse_args()
    host = provenance() if args.device != "cpu" else {}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(args.shape, args.device, Path(folder))
        if args.device != "cpu":
            results.append(measure_bus(rig))
            print(json.dumps(results[-1]), flush=True)
        for tier in TIERS:
            for case in measure_tier(rig, tier, args.rounds):
                results.append(case)
                print(json.dumps(case), flush=True)
    if args.out:
        command = "python -m bench.first_token " + " ".join(sys.argv[1:])
        report = {"host": host, "command": command, "results": results}
        write_result(args.out, report)


if __name__ == "__main__":
    main()
