"""Milliseconds a decode step and prefill tokens a second, through the engine, on one GPU.

    python -m bench.engine --batch 64 --adapters 64 --rank 16        # one case
    python -m bench.engine --suite targets --out targets.json       # the whole table
    ... --profile                                                    # kernels of a step, by time

Llama-3.1-8B's shape with random bf16 weights. A decode case adds `batch` requests of 32 random
tokens and takes 256 greedy tokens of each, no end token; its ms_step is the wall time of all of it
(prefill, sampling, scheduling) over 256. A prefill case adds 16 prompts of 1024 tokens and takes
one token of each. Adapters are PEFT folders of random tensors on all seven projections, registered
with the engine and loaded before the clock starts. The floor is what has to be read once (weights
without the embedding, each distinct adapter, half the KV at the end) at the copy bandwidth
measured in the same run, or the products at the measured rate when that is more.
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
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.device import provenance
from engine import AdapterPart, Engine, EngineConfig, Request, SamplingParams
from engine.config import ModelConfig
from engine.weights import LayerWeights, Weights

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT_TOKENS, NEW_TOKENS = 32, 256
MIXED = (4, 8, 16, 32, 64, 128)

# (batch, distinct adapters, target in ms a step, vLLM 0.26's) of ../shared/design/targets.md.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """kind "decode" or "prefill"; the ranks go round the adapters."""

    kind: str
    batch: int
    adapters: int
    ranks: tuple[int, ...] = (16,)

    @property
    def total_rank(self) -> int:
        return sum(itertools.islice(itertools.cycle(self.ranks), self.adapters))


def random_weights(model: ModelConfig, device: str) -> Weights:
    """Weights of the model's shape that keep activations near one."""

    def matrix(height: int, width: int) -> torch.Tensor:
        made = torch.empty(height, width, device=device, dtype=torch.bfloat16)
        return made.normal_(0, width**-0.5)

    ones = torch.ones(model.hidden_size, device=device, dtype=torch.bfloat16)
    hidden, inner = model.hidden_size, model.intermediate_size
    return Weights(
        embedding=matrix(model.vocab_size, hidden),
        layers=tuple(
            LayerWeights(
                input_norm=ones,
                qkv=matrix(model.q_size + 2 * model.kv_size, hidden),
                o=matrix(hidden, model.q_size),
                post_norm=ones,
                gate_up=matrix(2 * inner, hidden),
                down=matrix(hidden, inner),
            )
            for _ in range(model.num_layers)
        ),
        norm=ones,
        lm_head=matrix(model.vocab_size, hidden),
    )


def save_adapter(folder: Path, model: ModelConfig, rank: int, device: str) -> Path:
    """A PEFT folder of random A and B on all seven projections."""
    folder.mkdir(parents=True)
    tensors = {}
    for layer in range(model.num_layers):
        for index, (name, widths) in enumerate(zip(LINEARS, model.projection_widths, strict=True)):
            part = "self_attn" if index < 4 else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{name}"
            shapes = {"lora_A": (rank, widths[0]), "lora_B": (widths[1], rank)}
            for side, shape in shapes.items():
                made = torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
                tensors[f"{prefix}.{side}.weight"] = made.cpu()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(LINEARS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Bench:
    """An engine over random weights, and adapters made when a case first wants them."""

    def __init__(self, shape: str, device: str, *, arena_bytes: int, max_running: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bench-engine-"))
        (self._folder / "config.json").write_text(json.dumps(SHAPES[shape]))
        self.model = ModelConfig.from_fields(SHAPES[shape], None)
        self._device = device
        started = time.perf_counter()
        self.engine = Engine(
            EngineConfig(
                prefix_cache=False,  # every request is to be computed
                model_dir=self._folder,
                device=device,
                dtype="bfloat16",
                arena_bytes=arena_bytes,
                max_running=max_running,
                max_step_tokens=16384,
                loader_threads=8,
                max_context=2048,
                host_cache_bytes=1 << 30,
            ),
            weights=random_weights(self.model, device),
        )
        torch.cuda.synchronize()
        self.start_s = time.perf_counter() - started
        # As in a worker: what lives as long as the process is not walked again and again. A full
        # collection takes 7 to 17 ms here.
        gc.collect()
        gc.freeze()
        self._digests: dict[int, list[str]] = {}
        self._num_requests = 0

    def adapters(self, ranks: Sequence[int], count: int) -> list[str]:
        """Digests of `count` distinct adapters, made and registered as needed."""
        wanted = list(itertools.islice(itertools.cycle(ranks), count))
        chosen = []
        used: dict[int, int] = {}
        for rank in wanted:
            known = self._digests.setdefault(rank, [])
            used[rank] = used.get(rank, 0) + 1
            if used[rank] > len(known):
                digest = f"r{rank}-{len(known)}"
                folder = save_adapter(self._folder / digest, self.model, rank, self._device)
                self.engine.register_adapter(digest, folder)
                known.append(digest)
            chosen.append(known[used[rank] - 1])
        return chosen

    def run(self, batch: int, prompt: int, new: int, digests: list[str]) -> float:
        """Seconds from the first `step` to the last token."""
        for i in range(batch):
            adapters = (AdapterPart(digest=digests[i * len(digests) // batch]),) if digests else ()
            tokens = torch.randint(0, self.model.vocab_size, (prompt,)).tolist()
            self._num_requests += 1
            self.engine.add(
                Request(
                    request_id=str(self._num_requests),
                    token_ids=tokens,
                    sampling=SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True),
                    adapters=adapters,
                )
            )
        torch.cuda.synchronize()
        started = time.perf_counter()
        num_tokens = 0
        while self.engine.has_work():
            for output in self.engine.step():
                num_tokens += len(output.token_ids)
                if output.error is not None:
                    raise output.error
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        if num_tokens != batch * new:
            raise RuntimeError(f"{num_tokens} tokens came, not {batch * new}")
        return seconds

    def measure(self, case: Case, rounds: int) -> dict[str, Any]:
        """The case's fields; two rounds before the clock starts load adapters and compile."""
        digests = self.adapters(case.ranks, case.adapters)
        is_decode = case.kind == "decode"
        prompt, new = (PROMPT_TOKENS, NEW_TOKENS) if is_decode else (1024, 1)
        for _ in range(2):
            self.run(case.batch, prompt, 8 if is_decode else 1, digests)
        torch.cuda.reset_peak_memory_stats()
        seconds = [self.run(case.batch, prompt, new, digests) for _ in range(rounds)]
        best, median = min(seconds), statistics.median(seconds)
        out: dict[str, Any] = {
            "kind": case.kind,
            "batch": case.batch,
            "adapters": case.adapters,
            "rank": case.ranks[0] if len(case.ranks) == 1 else list(case.ranks),
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        }
        if is_decode:
            out["ms_step"] = round(median / new * 1e3, 3)
            out["ms_step_best"] = round(best / new * 1e3, 3)
            out["tok_s"] = round(case.batch * new / median)
        else:
            out["tok_s"] = round(case.batch * prompt / median)
            out["tok_s_best"] = round(case.batch * prompt / best)
        return out

    def floor_ms(self, case: Case, host: dict[str, Any]) -> float:
        """What a decode step cannot be faster than, see the module."""
        model = self.model
        per_layer = sum(n_in * n_out for n_in, n_out in model.projection_widths)
        params = model.num_layers * per_layer + model.vocab_size * model.hidden_size
        per_rank = model.num_layers * sum(map(sum, model.projection_widths))
        kv = 2 * model.num_layers * model.kv_size * (PROMPT_TOKENS + NEW_TOKENS // 2)
        adapters = case.total_rank * per_rank
        num_bytes = 2 * (params + adapters + case.batch * kv)
        read = num_bytes / host["copy_tb_s"] / 1e9
        compute = 2 * params * case.batch / host["matmul_tflop_s"] / 1e9
        return round(max(read, compute), 2)

    def profile(self, case: Case, num_steps: int = 8) -> None:
        """Print the kernels of a few decode steps (or of a prefill), the longest first."""
        digests = self.adapters(case.ranks, case.adapters)
        is_decode = case.kind == "decode"
        new = num_steps + 1 if is_decode else 1
        self.run(case.batch, PROMPT_TOKENS if is_decode else 1024, new, digests)
        activity = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[activity]) as profiler:
            self.run(case.batch, PROMPT_TOKENS if is_decode else 1024, new, digests)
        events = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
        total = sum(event.device_time_total for event in events)
        print(f"{case}: {total / 1e3:.2f} ms on the device, a prefill and {new - 1} decodes")
        for event in events[:18]:
            each = event.device_time_total / max(event.count, 1)
            share = event.device_time_total / total
            print(f"{share:6.1%} {event.count:7d} x {each:9.2f} us  {event.key[:90]}")

    def close(self) -> None:
        self.engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def suite() -> Iterator[Case]:
    """Every row of targets.md, the base of each batch before its adapters."""
    for batch, adapters, _, _ in TARGETS:
        yield Case(kind="decode", batch=batch, adapters=adapters)
    yield Case(kind="decode", batch=64, adapters=64, ranks=MIXED)
    yield Case(kind="decode", batch=64, adapters=0)  # once more, all adapters resident
    yield Case(kind="prefill", batch=16, adapters=0)
    yield Case(kind="prefill", batch=16, adapters=16)


def markdown(host: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The decode and prefill tables of targets.md with what came out."""
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
    bench: Bench, cases: Sequence[Case], host: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    """Measure each; one that fails is printed and left out."""
    results: list[dict[str, Any]] = []
    base: dict[tuple[str, int], float] = {}
    for case in cases:
        try:
            row = bench.measure(case, rounds)
        except Exception:
            # On a lent card one broken case must not cost the others.
            traceback.print_exc()
            continue
        field = "ms_step" if case.kind == "decode" else "tok_s"
        if case.adapters == 0:
            base.setdefault((case.kind, case.batch), row[field])
        if (case.kind, case.batch) in base:
            row["base_ratio"] = round(row[field] / base[case.kind, case.batch], 3)
        if case.kind == "decode":
            row["floor_ms"] = bench.floor_ms(case, host)
        row |= {name: host[name] for name in ("gpu", "copy_tb_s", "torch", "triton", "commit")}
        results.append(row)
        print(json.dumps(row), flush=True)
    return results


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--suite", choices=["targets"])
    parser.add_argument("--kind", choices=["decode", "prefill"], default="decode")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arena-gb", type=float, default=34.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="write host and results as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    case = Case(
        kind=arguments.kind,
        batch=arguments.batch,
        adapters=arguments.adapters,
        ranks=tuple(arguments.rank),
    )
    cases = list(suite()) if arguments.suite else [case]
    host = provenance()
    print(json.dumps(host), flush=True)
    torch.cuda.empty_cache()
    bench = Bench(
        arguments.shape,
        "cuda",
        arena_bytes=int(arguments.arena_gb * 1e9),
        max_running=max(each.batch for each in cases),
    )
    print(f"started in {bench.start_s:.1f} s, graphs captured", flush=True)
    results = run_cases(bench, cases, host, arguments.rounds)
    if arguments.suite:
        print(markdown(host, results))
    if arguments.profile:
        for each in cases:
            bench.profile(each)
    bench.close()
    if arguments.out:
        report = {"host": host, "start_s": round(bench.start_s, 1), "results": results}
        report["command"] = "python -m bench.engine " + " ".join(sys.argv[1:])
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(len(results) != len(cases))


if __name__ == "__main__":
    main()
