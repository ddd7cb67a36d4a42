"""The batch trainer itself at a shape: what it adds to the bare products of `training_stack`."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from typing import Any

import torch

from bench.training_files import config_fields
from bench.training_stack import Shape, Work, randn
from engine.model.config import ModelConfig
from engine.model.weights import build_weights
from engine.training.events import RunEnded
from engine.training.model import TrainingModel
from engine.training.parameters import AdapterLayout
from engine.training.run import RunRequest, RunRows, RunSettings
from engine.training.trainer import BatchTrainer, TrainerConfig

BUDGET = 16_384


class RandomTensors:
    """A checkpoint of random weights, made on the device as they are taken."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._like = torch.empty(0, dtype=dtype, device=device)

    def has(self, name: str) -> bool:
        return True

    def load(self, name: str, *shape: int) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._like.dtype, device=self._like.device)
        deviation = 1.0 if "embed" in name else 0.02 if "lm_head" in name else shape[1] ** -0.5
        return randn(*shape, like=self._like, deviation=deviation)

    def fuse(self, names: tuple[str, ...], heights: tuple[int, ...], width: int) -> torch.Tensor:
        return self.load(names[0], sum(heights), width)

    def drop(self, suffix: str) -> None:
        pass

    def check_all_taken(self) -> None:
        pass


def request_of(number: int, shape: Shape, work: Work, steps: int) -> RunRequest:
    """A run of `steps` steps of `work.rows` rows each."""
    tokens = torch.randint(shape.vocabulary, (work.rows * 4, work.length), dtype=torch.int32)
    answers = torch.zeros_like(tokens, dtype=torch.bool)
    answers[:, -max(1, int(work.length * work.answers)) :] = True
    return RunRequest(
        run_id=f"run-{number}",
        tenant=f"tenant-{number}",
        rows=RunRows(tokens.flatten(), answers.flatten(), [work.length] * len(tokens)),
        settings=RunSettings(
            rank=work.rank, steps=steps, batch_size=work.rows, seed=number, learning_rate=1e-4
        ),
    )


def open_trainer(shape: Shape, work: Work, device: str) -> BatchTrainer:
    """A trainer over random weights with room for the work's runs."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = ModelConfig.from_fields(config_fields(shape), 2)
    model = TrainingModel(config, build_weights(RandomTensors(device, dtype), config))
    size = AdapterLayout(config, request_of(0, shape, work, 1).settings).size
    return BatchTrainer(
        model,
        TrainerConfig(token_budget=BUDGET, max_runs=work.runs, pool_elements=work.runs * size),
    )


def time_trainer(
    name: str, shape: Shape, work: Work, steps: int, device: str, profile: bool
) -> dict[str, Any]:
    """Seconds of micro-batches in which all runs take part; of one of them the device's share."""
    began = time.perf_counter()
    trainer = open_trainer(shape, work, device)
    opened = time.perf_counter() - began
    micro_batches = -(-work.tokens // BUDGET)
    runs_steps = 2 + -(-(steps + 4) // micro_batches)
    for number in range(work.runs):
        trainer.add(request_of(number, shape, work, runs_steps))
    times: list[float] = []

    def step() -> None:
        start = time.perf_counter()
        trainer.step()
        times.append(time.perf_counter() - start)

    for _ in range(2 * micro_batches):
        step()
    first, times = times, []
    for _ in range(steps):
        step()
    seconds = statistics.median(times)
    tokens = min(work.tokens, BUDGET)
    case: dict[str, Any] = {
        "case": name,
        "runs": work.runs,
        "tokens": tokens,
        "tok_s": round(tokens / seconds),
        "step_ms": round(seconds * 1e3, 1),
        "opened_s": round(opened, 2),
        "first_step_s": round(first[0], 2),
        "second_step_s": round(first[1], 2),
        "slowest_ms": round(max(times) * 1e3, 1),
    }
    if device == "cuda":
        case["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        case["alloc_retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        case |= device_share(step, times)
    if profile:
        print(host_profile(step))
    while trainer.has_work:
        start = time.perf_counter()
        ended = sum(isinstance(event, RunEnded) for event in trainer.step())
        if ended:
            beside = time.perf_counter() - start - seconds
            case["ends"], case["end_of_a_run_ms"] = ended, round(beside * 1e3 / ended, 1)
            break
    trainer.close()
    return case


def device_share(step: Any, times: list[float]) -> dict[str, float]:
    """Milliseconds in which the device works in a step, and in which it waits for the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e3
    step_ms = statistics.median(times[:-1]) * 1e3
    return {"device_ms": round(busy, 1), "host_ms": round(step_ms - busy, 1)}


def host_profile(step: Any, lines: int = 25) -> str:
    """What the host does in a step, by its own time."""
    profile = cProfile.Profile()
    profile.runcall(step)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(lines)
    return text.getvalue()
