"""Compare Lorikeet with Hugging Face and PEFT on this machine's CPU, in one process.

    python -m bench.cpu [--model FOLDER] [--new-tokens 32] [--repeats 7] [--out FILE]

Every system gets the same prompts and adapters and generates greedily without EOS. Each round runs
every case once, compared cases next to each other where possible. A ratio is the median of the
rounds' own ratios, since the machine's speed changes by a tenth from minute to minute; tokens/s are
medians of all rounds. Prints a table and one JSON line per case, writes bench/results/cpu.json, and
exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from bench.machine import environment, write_result
from bench.workload import random_prompts, save_random_adapter
from engine import AdapterPart, Engine, EngineConfig, Request, SamplingParams
from worker.base_model import packaged_model

BASE_MODELS = Path(__file__).parents[1] / ".cache" / "base"
RESULTS = Path(__file__).parent / "results" / "cpu.json"
PROMPT_TOKENS = 32
BATCH = 16
RANK = 16

# (case, the case it is compared with, smallest ratio of their tokens/s; None: only reported)
RATIOS: tuple[tuple[str, str, float | None], ...] = (
    ("ours 16 adapters", "peft 16 adapters", 3.0),
    ("ours 1 base", "hf 1 base", 1.0),
    ("ours 16 adapters", "ours 16 base", 0.85),
    ("ours 16 base", "hf 16 base", None),
)

Prompts = list[list[int]]


class Ours:
    """Lorikeet's engine."""

    def __init__(self, model_dir: Path) -> None:
        # Without the prefix cache, so that every repeat is computed.
        config = EngineConfig(model_dir=model_dir, arena_bytes=1 << 30, prefix_cache=False)
        self._engine = Engine(config)
        self.model = self._engine.model

    def register(self, adapters: dict[str, Path]) -> None:
        for name, path in adapters.items():
            self._engine.register_adapter(name, path)

    def generate(self, prompts: Prompts, num_tokens: int, adapters: list[str] | None) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            parts = (AdapterPart(digest=adapters[i]),) if adapters else ()
            self._engine.add(
                Request(request_id=str(i), token_ids=prompt, sampling=sampling, adapters=parts)
            )
        count = 0
        while self._engine.has_work():
            count += sum(len(output.token_ids) for output in self._engine.step())
        assert count == len(prompts) * num_tokens


class HuggingFace:
    """transformers' generate, with PEFT's adapter_names for mixed batches."""

    def __init__(self, model_dir: Path, adapters: dict[str, Path]) -> None:
        # PEFT changes the model that it is given, so the plain one is loaded separately.
        self._plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        first, *rest = adapters
        self._peft = PeftModel.from_pretrained(base, adapters[first], adapter_name=first).eval()
        for name in rest:
            self._peft.load_adapter(adapters[name], adapter_name=name)

    def generate(self, prompts: Prompts, num_tokens: int, adapters: list[str] | None) -> None:
        model = self._peft if adapters else self._plain
        options: dict[str, Any] = {"adapter_names": adapters} if adapters else {}
        token_ids = torch.tensor(prompts)
        out = model.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            **options,
        )
        assert out.shape[1] == PROMPT_TOKENS + num_tokens


def measure(
    cases: dict[str, Callable[[], None]], tokens: dict[str, int], repeats: int
) -> dict[str, list[float]]:
    """Return tokens/s of every repeat of every case, without the first round, which warms up."""
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if repeat:
                speeds[name].append(tokens[name] / (time.perf_counter() - start))
    return speeds


def run_cases(
    model_dir: Path, folder: Path, num_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Return tokens/s of every case; write the adapters to `folder`."""
    names = [f"adapter-{i}" for i in range(BATCH)]
    ours = Ours(model_dir)
    adapters = {
        name: save_random_adapter(folder / name, ours.model, rank=RANK, seed=i)
        for i, name in enumerate(names)
    }
    ours.register(adapters)
    theirs = HuggingFace(model_dir, adapters)
    many = random_prompts(BATCH, PROMPT_TOKENS, ours.model.vocab_size)
    one = many[:1]
    cases: dict[str, Callable[[], None]] = {
        "ours 1 base": lambda: ours.generate(one, num_tokens, None),
        "hf 1 base": lambda: theirs.generate(one, num_tokens, None),
        "hf 16 base": lambda: theirs.generate(many, num_tokens, None),
        "ours 16 base": lambda: ours.generate(many, num_tokens, None),
        "ours 16 adapters": lambda: ours.generate(many, num_tokens, names),
        "peft 16 adapters": lambda: theirs.generate(many, num_tokens, names),
    }
    tokens = {name: num_tokens * (1 if " 1 " in name else BATCH) for name in cases}
    return measure(cases, tokens, repeats)


def summarise(speeds: dict[str, list[float]]) -> dict[str, list[dict[str, Any]]]:
    """Return the cases and their ratios, as the result file has them."""
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = []
    for case, other, least in RATIOS:
        rounds = [a / b for a, b in zip(speeds[case], speeds[other], strict=True)]
        ratio = statistics.median(rounds)
        ratios.append(
            {
                "case": case,
                "compared_with": other,
                "ratio": round(ratio, 3),
                "rounds": [round(value, 3) for value in rounds],
                "at_least": least,
                "passed": least is None or ratio >= least,
            }
        )
    cases = [
        {
            "system": name.split()[0],
            "batch": int(name.split()[1]),
            "adapters": BATCH if name.endswith("adapters") else 0,
            "rank": RANK if name.endswith("adapters") else 0,
            "tok_s": round(medians[name], 1),
            "runs": [round(value, 1) for value in values],
        }
        for name, values in speeds.items()
    ]
    return {"cases": cases, "ratios": ratios}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare with Hugging Face and PEFT on a CPU.")
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    result = environment("bench.cpu")
    result["threads"] = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or packaged_model(BASE_MODELS)
        speeds = run_cases(model, Path(folder), args.new_tokens, args.repeats)
    result.update(summarise(speeds))
    for case in result["cases"]:
        print(json.dumps(case))
    print(f"\n{'':18}{'compared with':20}{'ratio':>8}{'bar':>8}")
    for ratio in result["ratios"]:
        least = "" if ratio["at_least"] is None else f"{ratio['at_least']:.2f}"
        verdict = "" if ratio["passed"] else "  MISSED"
        figures = f"{ratio['ratio']:8.2f}{least:>8}{verdict}"
        print(f"{ratio['case']:18}{ratio['compared_with']:20}{figures}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_result(args.out, result)
    return 0 if all(ratio["passed"] for ratio in result["ratios"]) else 1


if __name__ == "__main__":
    sys.exit(main())
