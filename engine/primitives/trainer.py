"""CallTrainer: the adapters of many callers' loops over one base, trained call by call.

Start reading at `step`. A caller has one call under way at a time; calls of different callers share
a micro-batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.primitives.losses import PackedLosses, TokenLoss
from engine.training.errors import RunRefused, RunTooLarge
from engine.training.initial import draw_initial
from engine.training.model import TrainingModel
from engine.training.packer import MicroBatch, cut_step
from engine.training.parameters import (
    AdapterLayout,
    Span,
    SpanAllocator,
    clear,
    make_pools,
    to_host,
)
from engine.training.run import RunSettings
from engine.training.scheduler import Scheduler
from engine.training.tables import SiteTables
from engine.training.trainer import TrainerConfig
from kernels.training import RunStep, adamw, make_rows, make_segments

#: The tensors of a state: flat, as they lie in the caller's span of the pool of that name.
TENSORS = ("master", "first_moment", "second_moment", "gradient")


@dataclass(frozen=True, slots=True)
class State:
    """A caller's adapter between two calls, with its optimiser's moments and its gradient so far.

    tensors  on the host, by the names of TENSORS; without `gradient` there is none yet
    steps    optimiser steps made
    """

    tensors: Mapping[str, torch.Tensor]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The rows of a call, one behind the other, at least one token each.

    token_ids  [T] int32; `targets` [T] int64, the token that each of them predicts
    weights    [T] float32 of the loss; for a policy its advantages, beside `sampled` [T] float32
    is_forward no gradient is added
    """

    token_ids: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    sampled: torch.Tensor
    lengths: Sequence[int]
    loss: TokenLoss
    is_forward: bool = False


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of a pass: the log-probabilities of its targets [T] float32, and its loss."""

    caller: str
    logprobs: torch.Tensor
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """The settings of an optimiser step; a `max_norm` of 0 clips nothing."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBatch(MicroBatch):
    """A micro-batch of calls, in which every token predicts one."""

    losses: PackedLosses

    @property
    def reweigh(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self.losses.factors


@dataclass(slots=True, eq=False)
class _Pending:
    """A pass under way: rows in each of its pieces, and what came of those that are done."""

    asked: Pass
    counts: list[int]
    row: int = 0
    token: int = 0
    loss: float = 0.0
    logprobs: list[torch.Tensor] = field(default_factory=list)

    @property
    def lengths(self) -> Sequence[int]:
        """The lengths of the next piece's rows."""
        return self.asked.lengths[self.row : self.row + self.counts[0]]


@dataclass(slots=True, eq=False)
class _Caller:
    layout: AdapterLayout
    span: Span
    steps: int
    pending: _Pending | None = None


class CallTrainer:
    """Trains adapters over one base: calls in, log-probabilities and states out.

    A caller's results are what they would be alone, but for rounding; with `runs_a_pass` of 1 to
    the bit. One thread uses it; nothing here waits, reads or writes.
    """

    def __init__(self, model: TrainingModel, config: TrainerConfig) -> None:
        self._model, self._config = model, config
        self._spans = SpanAllocator(config.pool_elements)
        self._pools = make_pools(self._spans.capacity, model.device, model.dtype)
        self._tables = SiteTables(model.config, model.device)
        self._scheduler = Scheduler()
        self._callers: dict[str, _Caller] = {}

    @property
    def has_work(self) -> bool:
        """Return whether a step would do something."""
        return any(caller.pending is not None for caller in self._callers.values())

    def open(
        self, name: str, tenant: str, settings: RunSettings, state: State | None = None
    ) -> bool:
        """Take a caller in: from a state, or with PEFT's initial adapter. -> False: no room now.

        Raises RunRefused for targets that the base does not have and for a state of another
        adapter, RunTooLarge if there is never room.
        """
        assert name not in self._callers
        layout = AdapterLayout(self._model.config, settings)
        layout.check_targets(self._model.config)
        if layout.size > self._spans.capacity:
            problem = f"{layout.size} parameters; there is room for {self._spans.capacity}"
            raise RunTooLarge(problem, param="rank")
        if state is not None:
            for key, tensor in state.tensors.items():
                if key not in TENSORS or tensor.shape != (layout.size,):
                    raise RunRefused(f"its {key} is not that of this adapter", param="state")
        span = self._spans.take(layout.size)
        if span is None:
            return False
        caller = _Caller(layout, span, 0)
        self._callers[name] = caller
        if state is None:
            initial = draw_initial(layout, self._model.config, settings.seed)
            self._pools.master[span.elements].copy_(initial)
        else:
            for key, tensor in state.tensors.items():
                getattr(self._pools, key)[span.elements].copy_(tensor)
            caller.steps = state.steps
        self._pools.values[span.elements].copy_(self._pools.master[span.elements])
        self._scheduler.add(name, tenant)
        self._scheduler.begin(name)
        return True

    def state(self, name: str, *, has_gradient: bool = True) -> State:
        """Return a caller's state, on the host."""
        caller = self._callers[name]
        names = TENSORS if has_gradient else TENSORS[:-1]
        own = caller.span.elements
        tensors = {key: to_host(getattr(self._pools, key)[own]) for key in names}
        if has_gradient and not bool(tensors["gradient"].any()):
            del tensors["gradient"]
        return State(tensors, caller.steps)

    def adapter(self, name: str) -> dict[str, torch.Tensor]:
        """Return a caller's adapter by PEFT's names, on the host."""
        caller = self._callers[name]
        return caller.layout.tensors(to_host(self._pools.master[caller.span.elements]))

    def close(self, name: str) -> None:
        """Forget a caller that has no call under way."""
        caller = self._callers.pop(name)
        assert caller.pending is None
        clear(self._pools, caller.span)
        self._spans.give(caller.span)
        self._scheduler.remove(name)

    def begin(self, name: str, asked: Pass) -> None:
        """Begin a pass, which `step` ends. Raises RunRefused for tokens that the base lacks."""
        config = self._model.config
        most = max(asked.lengths)
        if most > config.max_positions:
            problem = f"a row has {most} tokens; the model has {config.max_positions} positions"
            raise RunRefused(problem, param="model_input")
        for what, ids in (("model_input", asked.token_ids), ("target_tokens", asked.targets)):
            if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
                raise RunRefused("a token id is outside the vocabulary", param=what)
        counts = cut_step(asked.lengths, self._config.token_budget)
        self._callers[name].pending = _Pending(asked, counts)

    def step(self) -> list[Passed]:
        """Send one micro-batch through the model; return the passes that ended with it."""
        pending = {
            name: caller.pending
            for name, caller in self._callers.items()
            if caller.pending is not None
        }
        sizes = {name: sum(each.lengths) for name, each in pending.items()}
        kinds = {name: each.asked.is_forward for name, each in pending.items()}
        config = self._config
        chosen = self._scheduler.select(sizes, config.token_budget, config.runs_a_pass, kinds)
        if not chosen:
            return []
        batch = self._pack([pending[name] for name in chosen])
        callers = [self._callers[name] for name in chosen]
        sites = self._tables.of([(caller.layout, caller.span) for caller in callers])
        passes = self._model.token_losses if kinds[chosen[0]] else self._model.backward
        losses = passes(batch, sites, self._pools)
        ended = []
        figures = zip(
            chosen,
            batch.losses.sums(losses),
            torch.split((-losses).float().cpu(), [sizes[name] for name in chosen]),
            strict=True,
        )
        for name, loss, logprobs in figures:
            each = pending[name]
            each.row, each.token = each.row + each.counts.pop(0), each.token + len(logprobs)
            each.loss += loss
            each.logprobs.append(logprobs)
            if not each.counts:
                self._callers[name].pending = None
                ended.append(Passed(name, torch.cat(each.logprobs), each.loss))
        return ended

    def _pack(self, pieces: Sequence[_Pending]) -> CallBatch:
        """Join the next pieces of these passes."""
        device = self._model.device
        counts = [sum(piece.lengths) for piece in pieces]

        def joined(name: str, kind: torch.dtype) -> torch.Tensor:
            parts = [
                getattr(piece.asked, name)[piece.token : piece.token + count]
                for piece, count in zip(pieces, counts, strict=True)
            ]
            return torch.cat(parts).to(kind).to(device, non_blocking=True)

        total = sum(counts)
        parts = [(piece.asked.loss, count) for piece, count in zip(pieces, counts, strict=True)]
        return CallBatch(
            token_ids=joined("token_ids", torch.int64),
            rows=make_rows([n for piece in pieces for n in piece.lengths], device),
            segments=make_segments(counts, device),
            predicting=torch.arange(total, device=device),
            targets=joined("targets", torch.int64),
            weights=torch.ones(total, device=device),
            answer_counts=torch.tensor(counts),
            row_answers=torch.tensor([n for piece in pieces for n in piece.lengths]),
            row_counts=[piece.counts[0] for piece in pieces],
            pairs=None,
            policy=None,
            losses=PackedLosses(
                parts, joined("weights", torch.float64), joined("sampled", torch.float64)
            ),
        )

    def optimise(self, steps: Mapping[str, Adam]) -> dict[str, float]:
        """Make these callers' optimiser steps together, which use up their gradients.

        -> the norm of each gradient; where that is not finite, the step was not made
        """
        made = [
            RunStep(
                first=self._callers[name].span.first,
                size=self._callers[name].span.size,
                step=self._callers[name].steps + 1,
                max_norm=adam.max_norm or math.inf,
                **{
                    key: value
                    for key, value in dataclasses.asdict(adam).items()
                    if key != "max_norm"
                },
            )
            for name, adam in steps.items()
        ]
        norms = dict(zip(steps, adamw(self._pools, made).tolist(), strict=True))
        for name, norm in norms.items():
            self._callers[name].steps += math.isfinite(norm)
        return norms

    def check_integrity(self) -> None:
        """Assert that what is kept agrees."""
        self._spans.check_integrity()
        assert self._spans.used == sum(caller.span.size for caller in self._callers.values())
        if not self._callers:
            assert not self._pools.master.any() and not self._pools.gradient.any()
