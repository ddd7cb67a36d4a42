"""Measure tokens/s of DashEngine for many prompts at once, on one GPU.

    python -m bench.offline [--adapters 64] [--precision fp8] [--step-tokens 16384] [--out FILE]

The work: 512 prompts of 128 to 1024 random tokens, and 32 to 256 greedy tokens for each, without an
end token; lengths are uniform and the same for every case. Cases: without adapters, and with
`--adapters` of rank 16 on all seven projections, whose popularity follows Zipf's law with exponent
1.1. The base is a loaded Hugging Face model of Llama-3.1-8B's shape with random bf16 weights.
DashConfig's defaults for the device apply unless an option changes them. The first round compiles
and loads; the median of the others counts. Every finished case is written to --out at once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.device import provenance
from bench.engine import PRECISIONS
from bench.machine import write_result
from bench.workload import SHAPES, save_random_adapter
from engine import DashConfig, DashEngine, SamplingParams

NUM_PROMPTS, PROMPT, NEW = 512, (128, 1024), (32, 256)
ZIPF = 1.1
RANK = 16
FILES = 2  # different adapters; each name has a copy of one, with pages of its own
# Number of adapters -> output tokens/s of vLLM 0.26 for this work, on another GPU of the same kind.
VLLM = {0: 6115, 64: 2756}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Work:
    """The lengths of prompts and answers, and the adapter that each prompt names."""

    def __init__(self, vocab_size: int, count: int, scale: float = 1.0) -> None:
        draw = random.Random(0)

        def length(bounds: tuple[int, int]) -> int:
            return max(1, round(scale * draw.randint(*bounds)))

        self._vocab_size = vocab_size
        self._lengths = [length(PROMPT) for _ in range(count)]
        self.new_tokens = [length(NEW) for _ in range(count)]
        self._num_drawn = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self._lengths)

    def prompts(self) -> list[list[int]]:
        """Draw new tokens at every call, so that the prefix cache finds nothing."""
        self._num_drawn += 1
        draw = random.Random(f"prompts {self._num_drawn}")
        return [[draw.randrange(self._vocab_size) for _ in range(n)] for n in self._lengths]

    def names(self, adapters: int) -> list[str | None]:
        """Return the adapter that each prompt names."""
        if not adapters:
            return [None] * len(self._lengths)
        weights = [(i + 1) ** -ZIPF for i in range(adapters)]
        chosen = random.Random(1).choices(range(adapters), weights, k=len(self._lengths))
        return [f"adapter-{i}" for i in chosen]


def random_model(shape: str, device: str, dtype: torch.dtype) -> Any:
    """Make a Hugging Face model of the shape with random weights, on the device."""
    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def register_adapters(engine: DashEngine, folder: Path, count: int, dtype: torch.dtype) -> None:
    """Register `count` adapters with distinct digests; few files have their tensors."""
    device = "cuda" if dtype is torch.bfloat16 else "cpu"
    for seed in range(min(FILES, count)):
        save_random_adapter(
            folder / str(seed),
            engine.model,
            rank=RANK,
            seed=seed,
            dtype=dtype,
            device=device,
        )
    for i in range(count):
        own = folder / f"adapter-{i}"
        own.mkdir()
        source = folder / str(i % FILES)
        (own / "adapter_model.safetensors").symlink_to(source / "adapter_model.safetensors")
        config = json.loads((source / "adapter_config.json").read_text())
        # Another config gives another digest, with pages of its own.
        (own / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 32 + i}))
        engine.register_adapter(f"adapter-{i}", own)


def measure(engine: DashEngine, work: Work, adapters: int, rounds: int) -> dict[str, Any]:
    """Measure output tokens/s of all prompts at once, with the engine's statistics."""
    names, seconds = work.names(adapters), []
    for _ in range(rounds + 1):
        prompts, before = work.prompts(), engine.stats()
        started = time.perf_counter()
        completions = engine.generate(
            prompts,
            active_adapters=names,
            max_new_tokens=work.new_tokens,
            sampling=GREEDY,
            progress=False,
        )
        seconds.append(time.perf_counter() - started)
        lengths = [len(completion.token_ids) for completion in completions]
        if lengths != work.new_tokens:
            errors = [c.error for c in completions if c.error is not None]
            raise RuntimeError(f"not all tokens came: {errors[:1]}")
    after, counted = engine.stats(), seconds[1:]
    num_new, num_prompt = sum(work.new_tokens), work.num_prompt_tokens
    median = statistics.median(counted)
    return {
        "prompts": len(names),
        "adapters": adapters,
        "max_running": after.max_running,
        "max_step_tokens": after.max_step_tokens,
        "output_tok_s": round(num_new / median),
        "output_tok_s_best": round(num_new / min(counted)),
        "total_tok_s": round((num_new + num_prompt) / median),
        "seconds": round(median, 3),
        "first_round_s": round(seconds[0], 3),
        "steps": after.num_steps - before.num_steps,
        "preemptions": {str(cause): count for cause, count in after.preemptions.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument(
        "--precision", choices=[name for name in PRECISIONS if name != "int4"], default="bf16"
    )
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--step-tokens", type=int, nargs="+", help="DashConfig.max_step_tokens")
    parser.add_argument("--running", type=int, help="DashConfig.max_running")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write host and results as JSON")
    args = parser.parse_args()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    host = provenance(args.device)
    print(json.dumps(host), flush=True)
    model = random_model(args.shape, args.device, dtype)
    work = Work(SHAPES[args.shape]["vocab_size"], args.prompts, args.scale)
    results: list[dict[str, Any]] = []
    command = "python -m bench.offline " + " ".join(sys.argv[1:])
    for step_tokens in args.step_tokens or [None]:
        config = DashConfig(
            max_step_tokens=step_tokens, max_running=args.running, **PRECISIONS[args.precision]
        )
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, DashEngine(model, config) as engine:
            start_s = round(time.perf_counter() - started, 1)
            register_adapters(engine, Path(folder), args.adapters, dtype)
            for adapters in (0, args.adapters) if args.adapters else (0,):
                row = measure(engine, work, adapters, args.rounds)
                row |= {"start_s": start_s, "precision": args.precision}
                results.append(row)
                print(json.dumps(row), flush=True)
                if args.out:
                    write_result(args.out, {"host": host, "command": command, "results": results})


if __name__ == "__main__":
    main()
