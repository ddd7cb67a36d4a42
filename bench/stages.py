"""Where the time of the engine's steps goes: the host's stages, its waiting, the device's passes.

`Stages` times functions of the engine while it is open. What it measures is for a profile, not for
a result: timing takes time.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from engine.drafts.speculation import Speculation
from engine.engine import Engine
from engine.execution.batch import BatchBuilder
from engine.execution.draft_heads import DraftHeads
from engine.execution.gpu_runner import GpuRunner, Tokens
from engine.execution.mask_uploads import MaskUploads

#: Stage -> functions, none of which calls another of them, but for `heads` in `propose`.
STAGES: dict[str, tuple[tuple[type, str], ...]] = {
    "schedule": ((Engine, "_schedule"),),
    "look ahead": ((Speculation, "look_ahead"),),
    "propose": ((Speculation, "propose"),),
    "heads": ((DraftHeads, "guess"),),
    "build": ((BatchBuilder, "build"),),
    "launch": ((GpuRunner, "start"), (GpuRunner, "replay")),
    "masks": ((MaskUploads, "apply"),),
    "wait": ((Tokens, "sampled"),),
    "take": ((Engine, "_take"),),
    "learn": ((Speculation, "learn"), (Speculation, "settle")),
}


class Stages(contextlib.ExitStack):
    """Times the stages of all engines while it is entered.

    `schedule` has `look ahead` in it, and `propose` has `heads`.
    """

    def __enter__(self) -> Stages:
        super().__enter__()
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._steps = self._rows = 0
        self._passes: list[tuple[Any, Any]] = []
        self._started = time.perf_counter()
        for stage, functions in STAGES.items():
            for owner, name in functions:
                self._time(stage, owner, name)
        run, replay = GpuRunner._run, GpuRunner.replay
        self.enter_context(patch.object(GpuRunner, "_run", self._passed(run)))
        self.enter_context(patch.object(GpuRunner, "replay", self._passed(replay)))
        self.enter_context(patch.object(Engine, "_commit", self._counted(Engine._commit)))
        return self

    def summary(self) -> dict[str, float]:
        """Return milliseconds per step of each stage; `device` is of the passes alone."""
        count = max(self._steps, 1)
        found = {stage: 1000 * seconds / count for stage, seconds in self.seconds.items()}
        found["step"] = 1000 * (time.perf_counter() - self._started) / count
        if self._passes:
            torch.cuda.synchronize()
            found["device"] = sum(a.elapsed_time(b) for a, b in self._passes) / count
        return {
            "steps": count,
            "tokens": round(self._rows / count, 1),
            **{name: round(value, 3) for name, value in found.items()},
        }

    def _time(self, stage: str, owner: type, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(real)
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args, **options)
            finally:
                self.seconds[stage] += time.perf_counter() - began

        self.enter_context(patch.object(owner, name, timed))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def commit(engine: Engine, launched: Any, now: float) -> Any:
            if launched is not None:
                self._steps += 1
                self._rows += launched.step.num_tokens
            return real(engine, launched, now)

        return commit

    def _passed(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Put events of the device around a pass."""

        @functools.wraps(real)
        def run(runner: GpuRunner, *args: Any, **options: Any) -> Any:
            if not torch.cuda.is_available():
                return real(runner, *args, **options)
            make: Any = torch.cuda.Event
            pair = make(enable_timing=True), make(enable_timing=True)
            pair[0].record()
            result = real(runner, *args, **options)
            pair[1].record()
            self._passes.append(pair)
            return result

        return run
