"""Measure milliseconds per decode step and prefill tokens/s of the engine on one GPU.

    python -m bench.engine --batch 64 --adapters 64 --rank 16        # one case
    python -m bench.engine --suite targets --out targets.json       # the whole table
    python -m bench.engine --suite shape --shape qwen3.5-9b         # a few cases of another shape
    python -m bench.engine --suite precision --out precision.json   # in each of PRECISIONS
    ... --profile                                                    # kernels of a step, by time

The model has the shape of Llama-3.1-8B, or of --shape, with random bf16 weights. A decode case adds
`batch` requests of 32 random tokens and generates 256 greedy tokens for each, without an end token;
its ms_step is the wall time of everything (prefill, sampling, scheduling) divided by 256. A prefill
case adds 16 prompts of 1024 tokens and generates one token for each; if it has adapters, it
alternates with the base. A first case generates one token for prompts of --prompt tokens; its
figure is the time in ms. A context case decodes behind prompts of --prompt tokens, whose own time
is not in ms_step. Adapters are PEFT folders with random tensors on all linears that may have them,
registered and loaded before the clock starts. Those of one rank share two folders under many
digests, each with pages of its own. Every finished case is printed and written to --out at once, so
that an interrupted run keeps its results.

The floor is the time to read once what a step must read (weights without the embedding, of experts
those that random choices touch, each distinct adapter, half the final KV; states of gated delta
nets, which it writes, too) at the copy bandwidth measured in the same run, or the time of the
products at the measured rate if that is longer.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.device import provenance
from bench.machine import write_result
from bench.workload import SHAPES, in_4_bits, random_weights, save_random_adapter
from engine import AdapterPart, Engine, EngineConfig, Request, SamplingParams
from engine.model.config import ModelConfig

PROMPT_TOKENS, NEW_TOKENS = 32, 256
CONTEXT_TOKENS, CONTEXT_STEPS = 4096, 64
HOST_KEYS = ("gpu", "copy_tb_s", "torch", "triton", "commit")
FILES = 2  # folders per rank
MIXED = (4, 8, 16, 32, 64, 128)

# (batch, distinct adapters, target in ms per step, vLLM 0.26's), from ../shared/design/targets.md.
TARGETS = (
    (1, 0, 4.7, 4.94),
    (16, 0, 5.0, 5.17),
    (64, 0, 5.8, 6.09),
    (128, 0, 7.2, 7.44),
    (256, 0, 10.5, 11.24),
    (1, 1, 5.0, 7.77),
    (64, 1, 6.3, 9.85),
    (16, 16, 5.9, 13.5),
    (64, 64, 7.8, 33.2),
    (128, 64, 9.5, 30.9),
    (256, 64, 13.0, 38.0),
)
# vLLM's result with its options VLLM_LORA_ENABLE_DUAL_STREAM=1 and specialize_active_lora.
VLLM_TUNED = {(64, 1): 7.46}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case, of kind "decode", "prefill" or "first"; adapters take the ranks in turn."""

    kind: str
    batch: int
    adapters: int
    ranks: tuple[int, ...] = (16,)
    first_prompt: int = PROMPT_TOKENS

    @property
    def prompt(self) -> int:
        return {"decode": PROMPT_TOKENS, "prefill": 1024}.get(self.kind, self.first_prompt)

    @property
    def figure(self) -> str:
        """The field that is compared with the base's result."""
        figures = {"prefill": "tok_s", "first": "ms_first"}
        return figures.get(self.kind, "ms_step")

    @property
    def total_rank(self) -> int:
        return sum(itertools.islice(itertools.cycle(self.ranks), self.adapters))


class Bench:
    """An engine with random weights, and adapters that are made when a case first needs them."""

    def __init__(
        self,
        shape: str,
        device: str,
        *,
        arena_bytes: int | None,
        max_running: int,
        in_fp32: bool = False,
        max_context: int = 2048,
        is_int4: bool = False,
        **config: Any,
    ) -> None:
        self._is_cpu = device == "cpu"
        self._dtype = torch.float32 if self._is_cpu or in_fp32 else torch.bfloat16
        self._folder = Path(tempfile.mkdtemp(prefix="bench-engine-"))
        (self._folder / "config.json").write_text(json.dumps(SHAPES[shape]))
        self.model = ModelConfig.from_fields(SHAPES[shape], None)
        self._device, self._shape = device, shape
        started = time.perf_counter()
        weights = random_weights(self.model, device, self._dtype)
        self.engine = Engine(
            EngineConfig(
                prefix_cache=False,  # so that every request is computed
                model_dir=self._folder,
                device=device,
                dtype="float32" if self._dtype == torch.float32 else "bfloat16",
                arena_bytes=arena_bytes,
                max_running=max_running,
                max_step_tokens=16384,
                loader_threads=8,
                max_context=max_context,
                host_cache_bytes=1 << 32,  # so that several of rank 128 are read at a time
                **config,
            ),
            weights=in_4_bits(weights) if is_int4 else weights,
        )
        del weights
        self._synchronize()
        self.start_s = time.perf_counter() - started
        # As in a worker, keep the garbage collector from visiting long-lived objects: a full
        # collection takes 7 to 17 ms here.
        gc.collect()
        gc.freeze()
        self._digests: dict[int, list[str]] = {}
        self._num_requests = 0
        self.temperature, self.precision = 0.0, "bf16"

    def adapters(self, ranks: Sequence[int], count: int) -> list[str]:
        """Return the digests of `count` distinct adapters, made and registered as needed."""
        wanted = list(itertools.islice(itertools.cycle(ranks), count))
        chosen = []
        used: dict[int, int] = {}
        for rank in wanted:
            known = self._digests.setdefault(rank, [])
            used[rank] = used.get(rank, 0) + 1
            if used[rank] > len(known):
                digest = f"r{rank}-{len(known)}"
                self.engine.register_adapter(digest, self._adapter_folder(rank, len(known)))
                known.append(digest)
            chosen.append(known[used[rank] - 1])
        return chosen

    def _adapter_folder(self, rank: int, index: int) -> Path:
        """Return the PEFT folder of a rank's adapter `index`."""
        seed = index % FILES
        folder = self._folder / f"r{rank}-file{seed}"
        if not folder.exists():
            save_random_adapter(
                folder,
                self.model,
                rank=rank,
                seed=seed,
                dtype=self._dtype,
                device=self._device,
            )
        return folder

    def run(self, batch: int, prompt: int, new: int, digests: list[str]) -> float:
        """Return the seconds from the first `step` to the last token."""
        for i in range(batch):
            adapters = (AdapterPart(digest=digests[i * len(digests) // batch]),) if digests else ()
            tokens = torch.randint(0, self.model.vocab_size, (prompt,)).tolist()
            self._num_requests += 1
            self.engine.add(
                Request(
                    request_id=str(self._num_requests),
                    token_ids=tokens,
                    sampling=SamplingParams(
                        max_tokens=new, temperature=self.temperature, ignore_eos=True
                    ),
                    adapters=adapters,
                )
            )
        self._synchronize()
        started = time.perf_counter()
        num_tokens = 0
        while self.engine.has_work():
            for output in self.engine.step():
                num_tokens += len(output.token_ids)
                if output.error is not None:
                    raise output.error
        self._synchronize()
        seconds = time.perf_counter() - started
        if num_tokens != batch * new:
            raise RuntimeError(f"{num_tokens} tokens came, not {batch * new}")
        return seconds

    def measure(self, case: Case, rounds: int) -> dict[str, Any]:
        """Measure the case; two rounds before the clock starts load adapters and compile."""
        if case.kind == "context":
            return self._measure_context(case, rounds)
        digests = self.adapters(case.ranks, case.adapters)
        is_decode = case.kind == "decode"
        prompt, new = case.prompt, NEW_TOKENS if is_decode else 1
        for _ in range(2):
            self.run(case.batch, prompt, 8 if is_decode else 1, digests)
        rounds = {"decode": rounds, "prefill": max(rounds, 5), "first": max(rounds, 20)}[case.kind]
        if not self._is_cpu:
            torch.cuda.reset_peak_memory_stats()
        seconds, beside = [], []
        for _ in range(rounds):
            seconds.append(self.run(case.batch, prompt, new, digests))
            if case.kind == "prefill" and digests:
                # Alternate: the GPU's clock rate falls from second to second under its power limit.
                beside.append(self.run(case.batch, prompt, new, []))
        best, median = min(seconds), statistics.median(seconds)
        out: dict[str, Any] = {
            "kind": case.kind,
            "batch": case.batch,
            "adapters": case.adapters,
            "rank": case.ranks[0] if len(case.ranks) == 1 else list(case.ranks),
        }
        if not self._is_cpu:
            out["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        if is_decode:
            out["ms_step"] = round(median / new * 1e3, 3)
            out["ms_step_best"] = round(best / new * 1e3, 3)
            out["tok_s"] = round(case.batch * new / median)
        elif case.kind == "first":
            out |= {"prompt": prompt, "ms_first": round(median * 1e3, 2)}
        else:
            out["tok_s"] = round(case.batch * prompt / median)
            out["tok_s_best"] = round(case.batch * prompt / best)
            if beside:
                out["base_ratio"] = round(statistics.median(beside) / median, 3)
        return out

    def _measure_context(self, case: Case, rounds: int) -> dict[str, Any]:
        """Measure decodes over long contexts: the time beyond that of the prefill alone."""
        digests = self.adapters(case.ranks, case.adapters)
        times: dict[int, list[float]] = {1: [], 1 + CONTEXT_STEPS: []}
        for _ in range(1 + rounds):
            for new, seconds in times.items():
                seconds.append(self.run(case.batch, case.prompt, new, digests))
        prefill, whole = (statistics.median(seconds[1:]) for seconds in times.values())
        return {
            "kind": case.kind,
            "batch": case.batch,
            "adapters": case.adapters,
            "rank": case.ranks[0],
            "prompt": case.prompt,
            "ms_step": round((whole - prefill) / CONTEXT_STEPS * 1e3, 3),
            "tok_s": round(case.batch * case.prompt / prefill),
        }

    def _synchronize(self) -> None:
        if not self._is_cpu:
            torch.cuda.synchronize()

    def floor_ms(self, case: Case, host: dict[str, Any]) -> float:
        """Return the least time of a decode step, as the module's docstring defines it."""
        model = self.model
        layers, experts = range(model.num_layers), model.plan.experts
        linears = [model.widths(i)[place] for i in layers for place in model.linears(i).values()]
        last = model.vocab_size * model.hidden_size
        read = used = sum(n_in * n_out for n_in, n_out in linears) + last
        if experts is not None:
            one, routers = 3 * model.hidden_size * experts.inner, experts.num * model.hidden_size
            idle = (1 - experts.chosen / experts.num) ** case.batch  # if tokens choose at random
            num = len(model.plan.expert_layers)
            read += num * (routers + round((1 - idle) * experts.num * one))
            used += num * (routers + experts.chosen * one)
        num_tokens = case.prompt + (NEW_TOKENS if case.kind == "decode" else CONTEXT_STEPS) // 2
        kv = 2 * model.num_kv_layers * model.kv_size * num_tokens
        adapters = case.total_rank * sum(map(sum, linears))
        num_bytes = 2 * (read + adapters + case.batch * kv) + case.batch * self._state_bytes
        products = 2 * used * case.batch
        took: float = max(num_bytes / host["copy_tb_s"], products / host["matmul_tflop_s"])
        return round(took / 1e9, 2)

    @property
    def _state_bytes(self) -> int:
        """Bytes that a step reads and writes of what gated delta nets keep of a sequence."""
        delta = self.model.plan.delta
        size = 0 if delta is None else delta.state_size
        return 2 * 4 * size * len(self.model.plan.delta_layers)

    def profile(self, case: Case, num_steps: int = 8) -> None:
        """Print the kernels of a few decode steps (or of a prefill), the slowest first."""
        digests = self.adapters(case.ranks, case.adapters)
        is_decode = case.kind == "decode"
        new = num_steps + 1 if is_decode else 1
        self.run(case.batch, case.prompt, new, digests)
        kinds = torch.profiler.ProfilerActivity
        activity, field = kinds.CUDA, "device_time_total"
        if self._is_cpu:
            activity, field = kinds.CPU, "self_cpu_time_total"
        with torch.profiler.profile(activities=[activity]) as profiler:
            self.run(case.batch, case.prompt, new, digests)
        times = [(getattr(event, field), event) for event in profiler.key_averages()]
        times.sort(key=lambda pair: -pair[0])
        total = sum(took for took, _ in times)
        print(f"{case}: {total / 1e3:.2f} ms on the device, a prefill and {new - 1} decodes")
        for took, event in times[:18]:
            each = took / max(event.count, 1)
            print(f"{took / total:6.1%} {event.count:7d} x {each:9.2f} us  {event.key[:90]}")

    def close(self) -> None:
        self.engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)


#: What the precision suite measures: name -> settings of the engine.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp8": {"base_precision": "fp8"},
    "bf16": {},
    "fp8, fp8 adapters": {"base_precision": "fp8", "adapter_precision": "fp8"},
    "fp8, fp8 kv": {"base_precision": "fp8", "kv_precision": "fp8"},
    "int4": {"is_int4": True},
}


def precision_suite(name: str) -> Iterator[Case]:
    """Yield the cases that are measured in one of PRECISIONS: those that it changes."""
    of_base = [
        Case(kind="prefill", batch=16, adapters=0),
        *(Case(kind="decode", batch=batch, adapters=0) for batch in (1, 64, 256)),
        Case(kind="context", batch=32, adapters=0, first_prompt=CONTEXT_TOKENS),
    ]
    of_adapters = [
        Case(kind="prefill", batch=16, adapters=16),
        *(
            Case(kind="decode", batch=batch, adapters=adapters)
            for batch, adapters in ((64, 1), (64, 64), (256, 64))
        ),
    ]
    yield from of_base if "adapters" not in name else ()
    yield from of_adapters if "kv" not in name else ()


def suite() -> Iterator[Case]:
    """Yield every row of targets.md, the base of each batch before its adapters."""
    yield Case(kind="prefill", batch=16, adapters=0)
    yield Case(kind="prefill", batch=16, adapters=16)
    for batch, adapters, _, _ in TARGETS:
        yield Case(kind="decode", batch=batch, adapters=adapters)
    yield Case(kind="decode", batch=64, adapters=0)  # once more, all adapters resident
    yield Case(kind="first", batch=1, adapters=0)
    yield Case(kind="first", batch=1, adapters=1)
    yield Case(kind="decode", batch=64, adapters=64, ranks=MIXED)


def shape_suite() -> Iterator[Case]:
    """Yield a few cases of any shape."""
    for batch, adapters in ((1, 0), (1, 1), (64, 0), (64, 64)):
        yield Case(kind="decode", batch=batch, adapters=adapters)
    yield Case(kind="context", batch=32, adapters=0, first_prompt=CONTEXT_TOKENS)
    yield Case(kind="prefill", batch=16, adapters=0)
    yield Case(kind="prefill", batch=16, adapters=16)


def markdown(host: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return the decode and prefill tables of targets.md with the results."""
    lines = [
        f"{host['gpu']}, copy {host['copy_tb_s']} TB/s, 8192³ bf16 {host['matmul_tflop_s']} "
        f"TFLOP/s, torch {host['torch']}, triton {host['triton']}, commit {host['commit']}",
        "",
        "| batch | distinct adapters | floor | vLLM 0.26 | target | ms a step | × own base |",
        "|---|---|---|---|---|---|---|",
    ]
    goals = {(b, a): (target, vllm) for b, a, target, vllm in TARGETS}
    for row in results:
        if row["kind"] != "decode":
            continue
        key = (row["batch"], row["adapters"])
        target, vllm = goals[key] if isinstance(row["rank"], int) else ("", "")
        adapters = row["adapters"] if isinstance(row["rank"], int) else f"{key[1]}, ranks 4-128"
        lines.append(
            f"| {row['batch']} | {adapters} | {row['floor_ms']} | {vllm} | {target} "
            f"| {row['ms_step']} | {row.get('base_ratio', 1.0)} |"
        )
    lines += ["", "| prefill 16 × 1024 | tok/s | × own base |", "|---|---|---|"]
    for row in results:
        if row["kind"] == "prefill":
            name = f"{row['adapters']} distinct" if row["adapters"] else "no adapters"
            lines.append(f"| {name} | {row['tok_s']} | {row.get('base_ratio', 1.0)} |")
    return "\n".join(lines)


def run_cases(
    bench: Bench,
    cases: Sequence[Case],
    host: dict[str, Any],
    rounds: int,
    save: Callable[[list[dict[str, Any]]], None] = lambda results: None,
) -> list[dict[str, Any]]:
    """Measure each case; print the error of one that fails, and leave it out.

    save  called with all results so far after each case
    """
    results: list[dict[str, Any]] = []
    base: dict[tuple[str, int], float] = {}
    for case in cases:
        started = time.perf_counter()
        try:
            row = bench.measure(case, rounds)
        except Exception:
            # One broken case must not cost the results of the others.
            traceback.print_exc()
            continue
        field = case.figure
        if case.adapters == 0:
            base.setdefault((case.kind, case.batch), row[field])
        if (case.kind, case.batch) in base and "base_ratio" not in row:
            row["base_ratio"] = round(row[field] / base[case.kind, case.batch], 3)
        row["precision"] = bench.precision
        if case.figure == "ms_step" and "copy_tb_s" in host and bench.precision == "bf16":
            row["floor_ms"] = bench.floor_ms(case, host)
            row["floor_ratio"] = round(row["ms_step"] / row["floor_ms"], 3)
        row |= {name: host[name] for name in HOST_KEYS if name in host}
        row["case_s"] = round(time.perf_counter() - started, 1)
        results.append(row)
        print(json.dumps(row), flush=True)
        save(results)
    return results


def write_report(
    path: Path | None,
    host: dict[str, Any],
    start_s: float,
    before: list[dict[str, Any]],
    results: list[dict[str, Any]],
) -> None:
    """Write the results so far, those before included; do nothing without a path."""
    if path is None:
        return
    report = {"host": host, "start_s": round(start_s, 1), "results": [*before, *results]}
    report["command"] = "python -m bench.engine " + " ".join(sys.argv[1:])
    write_result(path, report)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--suite", choices=["targets", "precision", "shape"])
    parser.add_argument("--precision", choices=PRECISIONS, help="one of a suite's; default: bf16")
    parser.add_argument(
        "--kind", choices=["decode", "prefill", "first", "context"], default="decode"
    )
    parser.add_argument(
        "--prompt", type=int, default=PROMPT_TOKENS, help="of a first or context case"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--arena-gb", type=float, help="0: the engine chooses; default: 34 on a GPU, else 0"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="write host and results as JSON")
    arguments = parser.parse_args()
    if arguments.arena_gb is None:
        arguments.arena_gb = 0.0 if arguments.device == "cpu" else 34.0
    return arguments


def main() -> None:
    arguments = parse()
    case = Case(
        kind=arguments.kind,
        batch=arguments.batch,
        adapters=arguments.adapters,
        ranks=tuple(arguments.rank),
        first_prompt=arguments.prompt,
    )
    # The base first: every case is compared with it.
    bases = [replace(case, adapters=0)] if case.adapters else []

    def cases_of(name: str) -> list[Case]:
        if arguments.suite == "precision":
            return list(precision_suite(name))
        if arguments.suite == "shape":
            return list(shape_suite())
        return list(suite()) if arguments.suite else [*bases, case]

    host = provenance(arguments.device)
    print(json.dumps(host), flush=True)
    names = [arguments.precision or "bf16"]
    if arguments.suite == "precision" and arguments.precision is None:
        names = list(PRECISIONS)
    done: list[dict[str, Any]] = []
    failed = 0
    for name in names:
        cases = cases_of(name)
        bench = Bench(
            arguments.shape,
            arguments.device,
            arena_bytes=int(arguments.arena_gb * 1e9) or None,
            max_running=max(each.batch for each in cases),
            max_context=max(2048, *(each.prompt + NEW_TOKENS for each in cases)),
            **PRECISIONS[name],
        )
        bench.temperature, bench.precision = arguments.temperature, name
        print(f"started in {bench.start_s:.1f} s, graphs captured", flush=True)
        save = functools.partial(write_report, arguments.out, host, bench.start_s, done)
        results = run_cases(bench, cases, host, arguments.rounds, save)
        if arguments.suite == "targets":
            print(markdown(host, results))
        if arguments.profile:
            for each in cases:
                bench.profile(each)
        bench.close()
        save(results)
        done += results
        failed += len(cases) - len(results)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
