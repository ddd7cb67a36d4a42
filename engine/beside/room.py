"""TrainingRoom: a trainer over a serving engine's weights, in its pages and in its thread.

A micro-batch is one pass through all layers, forward and backward. Between any two of them the
trainer asks here whether a step of the engine is due (`give_way`):

    a request waits for its first token     steps, until it has it
    the step in flight computes it          none: it is read after the next layer
    requests have their first token       a step as often as training's share allows
    nothing to serve                        none

Start reading at `TrainingRoom.give_way`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.beside.pace import DeviceStopwatch, HostStopwatch, Pace, Stopwatch
from engine.engine import Engine
from engine.errors import OutOfMemory
from engine.training.memory import bytes_per_element, dense_bytes, elements_of, plan_memory
from engine.training.model import TrainingModel
from engine.training.run import HeldOut, RunRequest, RunRows, RunSettings
from engine.training.trainer import BatchTrainer, TrainerConfig
from kernels.training import SPAN

log = logging.getLogger(__name__)

# Longest time of steps in a row for requests without a first token, before training computes a
# layer, in seconds.
_BURST_S = 1.0
# Default token_budget: the pass of the widest micro-batch has to end soon once pages are wanted
# back.
_TOKENS = {"cpu": 256, "cuda": 4096}
# Share of a GPU's free memory that is left to serving: blocks of its allocator, prompts'
# activations.
_LEFT_FREE = 0.25
# Ranks that kernels are compiled for before requests come: each compiled kernel also serves nearby
# ranks.
_USUAL_RANKS = (8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideConfig:
    """The settings of training beside serving. Raises ValueError naming the field that is wrong.

    share         of the time for training while all requests have their first token
    page_share    the largest share of the arena's pages to lend
    token_budget  tokens of a micro-batch; None: 4,096 on a GPU, 256 on a CPU
    max_runs      that take part at a time
    longest_s     seconds from one step of the engine to the next at most
    """

    share: float = 0.85
    page_share: float = 0.6
    token_budget: int | None = None
    max_runs: int = 64
    longest_s: float = 0.075

    def __post_init__(self) -> None:
        for name in ("share", "page_share"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, not between 0 and 1")
        if self.max_runs < 1 or (self.token_budget or 1) < 1:
            raise ValueError("max_runs and token_budget are 1 or more")


class Serving(Protocol):
    """The engine's step functions, called by the thread that trains."""

    def receive(self) -> None:
        """Give the engine what has arrived for it, without waiting."""

    def step(self) -> None:
        """Make one step of the engine and pass its outputs on."""

    def settle(self) -> None:
        """Have the engine read the step in flight, and pass its outputs on."""


class _Nothing:
    """Serving while there are no requests yet."""

    def receive(self) -> None: ...
    def step(self) -> None: ...
    def settle(self) -> None: ...


class TrainingRoom:
    """Owns the trainer and the pages that it has, between `open` and `close`.

    Between the two the trainer's steps serve, too; `give_way` has to be called by whoever waits for
    anything else. Raises ValueError for an engine without `EngineConfig.lends_weights`.
    """

    def __init__(self, engine: Engine, serving: Serving, config: BesideConfig) -> None:
        if engine.lending.weights is None:
            raise ValueError("the engine does not lend its weights: set lends_weights")
        self._engine, self._lending, self._serving = engine, engine.lending, serving
        self._weights, self._config = engine.lending.weights, config
        self._pace = Pace(config.share, config.longest_s)
        self._budget = config.token_budget or _TOKENS[self._weights.embedding.device.type]
        self._watch = self._stopwatch()
        self._trainer: BatchTrainer | None = None

    @property
    def is_open(self) -> bool:
        return self._trainer is not None

    @property
    def is_wanted_back(self) -> bool:
        """Return whether a request needs the memory: the trainer must save its runs and `close`."""
        return self._lending.is_short

    @property
    def trained_s(self) -> float:
        """Seconds of the device that went into training so far."""
        return self._watch.seconds

    def prepare(self, ranks: Sequence[int] = _USUAL_RANKS) -> None:
        """Train made-up rows of a run of each rank, and forget them; before there are requests.

        So a GPU's kernels are compiled, or read from Triton's cache, while nobody waits. Of a
        worker just started the first run held requests up for 20 s (H100). A rank that finds no
        room is left out. Where a micro-batch has too little memory the log says so, and nothing
        more is prepared: a run is told when it asks.
        """
        began = time.monotonic()
        serving, self._serving = self._serving, _Nothing()
        try:
            for rank in ranks:
                run = _rehearsal(rank)
                trainer = self.open([elements_of(self._engine.model, run.settings)])
                if trainer is not None:
                    trainer.add(run)
                    while trainer.has_work:
                        trainer.step()
                self.close()
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            log.warning("training is not prepared: %s", error)
        else:
            seconds = round(time.monotonic() - began, 1)
            log.info("training is prepared", extra={"seconds": seconds})
        finally:
            self.close()
            self._serving = serving
        self._watch = self._stopwatch()
        self._lending.trained_s = 0.0

    def open(self, sizes: Sequence[int]) -> BatchTrainer | None:
        """Take pages for runs of these sizes, and make a trainer in them.

        sizes  of each run, in elements (`engine.training.memory.elements_of`)
        -> None: there is no room now for the largest. Fewer than all may take part at a time

        Raises OutOfMemory if the GPU has too little outside the arena for a micro-batch.
        """
        assert self._trainer is None, "training is already open: close it first"
        weights, dtype = self._weights, self._weights.embedding.dtype
        element = bytes_per_element(dtype)
        wanted = sum(sorted(sizes, reverse=True)[: self._config.max_runs]) * element
        most = int(self._config.page_share * self._lending.num_obtainable)
        memory = self._lending.lend(min(-(-wanted // self._lending.page_bytes), most))
        if memory is None:
            return None
        try:
            elements = memory.numel() // element // SPAN * SPAN
            if elements >= max(sizes):
                settings = TrainerConfig(
                    token_budget=self._budget,
                    max_runs=self._config.max_runs,
                    runs_a_pass=1 if not memory.is_cuda else None,
                    pool_elements=elements,
                )
                model = TrainingModel(
                    self._engine.model, weights, self._num_recomputed(dtype), self.give_way
                )
                self._trainer = BatchTrainer(model, settings, memory)
        finally:
            if self._trainer is None:
                self._lending.take_back()
        return self._trainer

    def serve_by(self, serving: Serving) -> None:
        """Step the engine through `serving` from now on."""
        self._serving = serving

    def close(self) -> None:
        """Give the pages back; runs that were not saved before are lost. Idempotent."""
        self._watch.stop()
        self._lending.trained_s = self._watch.seconds
        if self._trainer is not None:
            self._trainer = None
            self._lending.take_back()

    def give_way(self) -> None:
        """Serve the steps that are due, and return: between two layers, or while training waits."""
        self._watch.stop()
        self._lending.trained_s = self._watch.seconds
        if self._engine.computes_first_token:
            self._serving.settle()
        self._serving.receive()
        began, steps = time.monotonic(), 0
        while self._is_step_due(began, steps):
            steps += 1
            self._pace.note_step(time.monotonic(), self._watch.seconds)
            self._serving.step()
            self._serving.receive()
        self._watch.start()

    def _is_step_due(self, began: float, steps: int) -> bool:
        if not self._engine.has_work():
            return False
        if self._engine.computes_first_token:
            return False  # a layer is launched behind it, and the device never waits for the host
        now = time.monotonic()
        # Once pages are wanted back, the pass has to end before anybody gets them.
        may_burst = now - began < _BURST_S and not self.is_wanted_back
        if may_burst and self._lending.awaits_first_token:
            # A step looks whether an adapter has come; more of them in a row would not help it.
            return steps == 0 or self._lending.may_get_first_token
        return self._pace.is_due(now, self._watch.seconds)

    def _stopwatch(self) -> Stopwatch:
        return DeviceStopwatch() if self._weights.embedding.is_cuda else HostStopwatch()

    def _num_recomputed(self, dtype: torch.dtype) -> int:
        """Return how many layers a micro-batch computes twice with the free memory."""
        device = self._weights.embedding.device
        if device.type == "cpu":
            return 0
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        try:
            plan = plan_memory(
                self._engine.model,
                dtype,
                free_bytes=int(free * (1 - _LEFT_FREE)),
                token_budget=self._budget,
                wanted_elements=SPAN,
                least_elements=SPAN,
                dense_bytes=dense_bytes(self._weights.layers, dtype),
            )
        except OutOfMemory as error:
            raise OutOfMemory(
                f"{error.message} outside the arena: set reserved_share (the worker's "
                "LORIKEET_TRAINER_GPU_SHARE) or a smaller token_budget"
            ) from error
        return plan.num_recomputed


def _rehearsal(rank: int) -> RunRequest:
    """Return a run of one step that uses every part of training: updates and validation."""
    rows = RunRows(torch.arange(64) % 8, torch.ones(64, dtype=torch.bool), [32, 32])
    return RunRequest(
        run_id="rehearsal",
        tenant="",
        rows=rows,
        settings=RunSettings(rank=rank, steps=1, batch_size=2),
        held_out=HeldOut(rows=rows, every=1),
    )
