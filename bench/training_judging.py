"""What it costs to score a gate's cases in the training batch, and in the serving engine.

    python -m bench.training_judging [--tiny --device cpu] [--out FILE]

A run has ended: the expected answers of its suite are scored under the new adapter and under the
live one, both of rank 16 on all linears of a base of Llama-3.1-8B's shape with random weights.
`batch` is `engine.training.held_out`, whose passes the other runs of the batch wait for;
`serving` is the engine that answers requests, asked for the log-probabilities of the same prompts
with nothing else to do, adapters in its memory. Requests cross no queue and no network in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.device import provenance, write_whole
from bench.offline import RANK, random_model, register_adapters
from bench.training_files import ANSWER, LENGTH, config_fields
from bench.training_stack import TINY, Shape
from bench.training_trainer import BUDGET, RandomTensors
from bench.workload import save_random_adapter
from engine import DashConfig, DashEngine, SamplingParams
from engine.model.config import ModelConfig
from engine.model.weights import build_weights
from engine.training.held_out import Judged, held_out_passes
from engine.training.model import TrainingModel
from engine.training.parameters import AdapterLayout
from engine.training.run import RunRows, RunSettings

NAMES = ("adapter-0", "adapter-1")
#: Scores, and no more than the one token that a request has at least.
_SCORED = SamplingParams(temperature=0.0, prompt_logprobs=0)


@dataclass(frozen=True)
class Suite:
    """The expected answers of so many cases, of so many tokens each."""

    cases: int
    length: int = LENGTH
    answer: int = ANSWER

    def tokens(self, vocabulary: int) -> torch.Tensor:
        """-> [cases, length] int32, the same each time"""
        generator = torch.Generator().manual_seed(self.cases)
        size = (self.cases, self.length)
        return torch.randint(vocabulary, size, dtype=torch.int32, generator=generator)


SUITES = (Suite(50), Suite(400), Suite(400, 1024, 256))


class BatchJudge:
    """A training model and two adapters of random numbers, which lie on the host as a job's do."""

    def __init__(self, shape: Shape, folder: Path, device: str, dtype: torch.dtype) -> None:
        config = ModelConfig.from_fields(config_fields(shape), 2)
        self._adapters = {}
        for seed, name in enumerate(NAMES):
            made = save_random_adapter(
                folder / name, config, rank=RANK, seed=seed, dtype=dtype, device=device
            )
            self._adapters[name] = load_file(made / "adapter_model.safetensors")
        self._model = TrainingModel(config, build_weights(RandomTensors(device, dtype), config))
        self._settings = RunSettings(rank=RANK)
        self._size = AdapterLayout(config, self._settings).size

    def measure(self, suite: Suite, vocabulary: int, rounds: int) -> dict[str, Any]:
        """Seconds of the whole, and milliseconds of a pass, for which other runs wait."""
        tokens = suite.tokens(vocabulary)
        answers = torch.zeros_like(tokens, dtype=torch.bool)
        answers[:, -suite.answer :] = True
        rows = RunRows(tokens.flatten(), answers.flatten(), [suite.length] * suite.cases)
        judged = [
            Judged(name=name, rows=rows, settings=self._settings, adapter=tensors)
            for name, tensors in self._adapters.items()
        ]
        seconds, passes = [], list[float]()
        for _ in range(rounds + 1):
            began = last = time.perf_counter()
            passes = []
            for ended in held_out_passes(
                self._model, judged, token_budget=BUDGET, pool_elements=2 * self._size
            ):
                now = time.perf_counter()
                passes.append((now - last) * 1e3)
                last = now
                assert all(torch.isfinite(each.token_losses).all() for each in ended)
            seconds.append(time.perf_counter() - began)
        return _figures(seconds, 2 * suite.cases * suite.length) | {
            "passes": len(passes),
            "pass_ms": round(statistics.median(passes), 1),
            "slowest_pass_ms": round(max(passes), 1),
        }


def measure_serving(
    engine: DashEngine, suite: Suite, vocabulary: int, rounds: int
) -> dict[str, Any]:
    """Seconds until all prompts are scored under both adapters."""
    prompts = suite.tokens(vocabulary).tolist() * len(NAMES)
    adapters: list[str | None] = [name for name in NAMES for _ in range(suite.cases)]
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        completions = engine.generate(
            prompts,
            active_adapters=adapters,
            max_new_tokens=1,
            sampling=_SCORED,
            progress=False,
        )
        seconds.append(time.perf_counter() - began)
        for completion in completions:
            assert completion.error is None, completion.error
            scores = completion.prompt_logprobs
            assert scores is not None and len(scores) == suite.length - 1
    return _figures(seconds, len(prompts) * suite.length)


def _figures(seconds: list[float], tokens: int) -> dict[str, Any]:
    """Of rounds whose first one warms up."""
    median = statistics.median(seconds[1:])
    return {
        "seconds": round(median, 3),
        "tok_s": round(tokens / median),
        "first_round_s": round(seconds[0], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, for trying this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, dtype = options.device, torch.bfloat16 if options.device == "cuda" else torch.float32
    shape, name = (TINY, "tiny") if options.tiny else (Shape(), "llama-3.1-8b")
    suites = [replace(each, cases=4) for each in SUITES] if options.tiny else SUITES
    report: dict[str, Any] = {"host": provenance(device), "shape": name, "budget": BUDGET}
    cases: list[dict[str, Any]] = [vars(suite).copy() for suite in suites]
    report["cases"] = cases
    with tempfile.TemporaryDirectory() as folder:
        judge = BatchJudge(shape, Path(folder), device, dtype)
    for case, suite in zip(cases, suites, strict=True):
        case["batch"] = judge.measure(suite, shape.vocabulary, options.rounds)
    if device == "cuda":
        report["batch_peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    del judge
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    model = random_model(name, device, dtype)
    with tempfile.TemporaryDirectory() as folder, DashEngine(model, DashConfig()) as engine:
        register_adapters(engine, Path(folder), len(NAMES), dtype)
        for case, suite in zip(cases, suites, strict=True):
            case["serving"] = measure_serving(engine, suite, shape.vocabulary, options.rounds)
    for case in cases:
        print(json.dumps(case), flush=True)
    if options.out:
        write_whole(options.out, report)


if __name__ == "__main__":
    main()
