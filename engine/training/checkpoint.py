"""A run's state between two of its optimiser steps: enough to resume as if never stopped.

Between its updates a run's parameters rest, so a checkpoint is taken whenever the trainer is
between micro-batches. What the run has gone through of its next step is done again: the order of
its rows, its dropout and the sums of its gradient are functions of its settings and its step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.config import ModelConfig
from engine.training.active import ActiveRun
from engine.training.errors import RunRefused
from engine.training.parameters import AdapterLayout, Span, copy_in_pieces, to_host
from engine.training.run import RunRequest
from engine.training.validation import Validation
from kernels.training import Pools

VERSION = 2
#: The tensors of a checkpoint: flat, as they lie in the run's span of the pool of that name.
MASTER = "master"
TENSORS = (MASTER, "first_moment", "second_moment")
#: The masters of the best state so far; only in checkpoints of runs that are validated.
BEST = "best"
#: The log-probabilities of the rows under the run's start, of those trained on and those held out;
#: only in checkpoints of preference runs that have them all.
REFERENCE = ("reference", "held_out_reference")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """tensors  on the host, by the names of TENSORS, BEST and REFERENCE
    state    what JSON can carry: settings, step, tokens, and what the run belongs to
    """

    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def tokens(self) -> int:
        return int(self.state["tokens"])


def take(run: ActiveRun, pools: Pools, between: Callable[[], None] | None = None) -> Checkpoint:
    """Return the run's state after its last optimiser step; for `between` see `to_host`."""
    own, validation = run.span.elements, run.validation
    tensors = {name: to_host(getattr(pools, name)[own], between) for name in TENSORS}
    state = {
        "version": VERSION,
        "run_id": run.request.run_id,
        "settings": dataclasses.asdict(run.request.settings),
        "rows": run.request.rows.digest,
        "step": run.step,
        "tokens": run.tokens,
    }
    if validation is not None:
        state |= {"held_out": _held_out(run.request), "validation": validation.state()}
        if validation.best is not None:
            tensors[BEST] = validation.best
    if run.reference is not None and run.reference.is_whole:
        tensors |= dict(zip(REFERENCE, run.reference.values(), strict=False))
    return Checkpoint(tensors, state)


def _held_out(request: RunRequest) -> list[Any] | None:
    """Names what a run is validated with, and when."""
    given = request.held_out
    return None if given is None else [given.rows.digest, given.every, given.patience]


def check(saved: Checkpoint, request: RunRequest, config: ModelConfig) -> None:
    """Raise RunRefused unless the checkpoint is one of this run on this base."""
    state = saved.state
    if state.get("version") != VERSION:
        raise RunRefused(f"it is of version {state.get('version')!r}", param="checkpoint")
    wanted = {
        "run_id": request.run_id,
        "settings": _plain(dataclasses.asdict(request.settings)),
        "rows": request.rows.digest,
        "held_out": _held_out(request),
    }
    for name, value in wanted.items():
        if _plain(state.get(name)) != value:
            raise RunRefused(f"its {name} are not this run's", param="checkpoint")
    size = AdapterLayout(config, request.settings).size
    for name in (*TENSORS, *({BEST} & saved.tensors.keys())):
        if name not in saved.tensors or saved.tensors[name].shape != (size,):
            raise RunRefused(f"its {name} is not that of this base", param="checkpoint")
    _check_reference(saved, request)
    if request.held_out is not None:
        try:
            _restore_validation(saved, Validation(request.held_out, request.settings.steps, 1))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunRefused(f"its validation: {error!r}", param="checkpoint") from error


def _check_reference(saved: Checkpoint, request: RunRequest) -> None:
    if not request.settings.has_pairs or (saved.step == 0 and REFERENCE[0] not in saved.tensors):
        return
    held_out = [] if request.held_out is None else [request.held_out.rows]
    for name, rows in zip(REFERENCE, [request.rows, *held_out], strict=False):
        if name not in saved.tensors or saved.tensors[name].shape != (len(rows),):
            raise RunRefused(f"its {name} is not that of these rows", param="checkpoint")


def restore(
    saved: Checkpoint, pools: Pools, span: Span, between: Callable[[], None] | None = None
) -> None:
    """Write a checkpoint into a span; for `between` see `to_host`."""
    for name in TENSORS:
        copy_in_pieces(getattr(pools, name)[span.elements], saved.tensors[name], between)


def restore_run(saved: Checkpoint, run: ActiveRun) -> None:
    """Give a run what a checkpoint has of it beside its span."""
    if run.reference is not None and REFERENCE[0] in saved.tensors:
        run.reference.restore([saved.tensors[name] for name in REFERENCE if name in saved.tensors])
    if run.validation is not None:
        _restore_validation(saved, run.validation)


def _restore_validation(saved: Checkpoint, validation: Validation) -> None:
    validation.restore(saved.state["validation"], saved.tensors.get(BEST))


def _plain(value: Any) -> Any:
    """As JSON gives it back: lists for tuples."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
