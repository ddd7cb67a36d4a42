"""BatchTrainer: many runs' adapters over one base, trained in shared micro-batches.

Start reading at `step`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from engine.training import checkpoint
from engine.training.active import ActiveRun
from engine.training.checkpoint import Checkpoint
from engine.training.errors import (
    RunDiverged,
    RunRefused,
    RunTooLarge,
    RunUnsupported,
    TrainingError,
)
from engine.training.events import (
    Event,
    Outcome,
    RunEnded,
    RunProgress,
    RunStarted,
    SamplesWanted,
)
from engine.training.initial import InitialAdapters
from engine.training.model import TrainingModel
from engine.training.packer import pack
from engine.training.parameters import (
    AdapterLayout,
    Span,
    SpanAllocator,
    clear,
    copy_in_pieces,
    make_pools,
    to_host,
)
from engine.training.policy import Samples
from engine.training.run import RunRequest, unsupported
from engine.training.scheduler import Scheduler
from engine.training.tables import SiteTables
from engine.training.validation import StepMade, Validation
from kernels.training import RunStep, adamw


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The settings of one trainer.

    token_budget   tokens of a micro-batch; a longer row is one of its own
    max_runs       that take part at a time
    runs_a_pass    that share a micro-batch at most; None: as many as fit. With 1 a run's results
                   are the same to the bit whoever else takes part
    pool_elements  parameters of all runs that take part, in elements (`AdapterLayout.size` each);
                   on a GPU in bfloat16 an element takes 18 bytes, on a CPU 16
    """

    token_budget: int = 16_384
    max_runs: int = 64
    runs_a_pass: int | None = None
    pool_elements: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: RunRequest
    layout: AdapterLayout
    saved: Checkpoint | None


class BatchTrainer:
    """Trains runs over one base: token ids in, adapters and metrics out.

    A run's adapter is what it would be had the run been alone, but for rounding. One thread uses
    it; nothing here waits, reads or writes.
    """

    def __init__(
        self, model: TrainingModel, config: TrainerConfig, memory: torch.Tensor | None = None
    ) -> None:
        """Make a trainer without runs; `memory` is that of the pools (`make_pools`)."""
        self._model, self._config = model, config
        self._spans = SpanAllocator(config.pool_elements)
        self._pools = make_pools(self._spans.capacity, model.device, model.dtype, memory)
        self._tables = SiteTables(model.config, model.device)
        self._initial = InitialAdapters(model.config, model.device)
        self._scheduler = Scheduler()
        self._waiting: dict[str, _Waiting] = {}
        self._active: dict[str, ActiveRun] = {}
        self._events: list[Event] = []

    @property
    def has_work(self) -> bool:
        """Return whether a step would do or report something."""
        return bool(self._waiting or self._active or self._events)

    @property
    def used_elements(self) -> int:
        """Elements of each pool that runs own now."""
        return self._spans.used

    def add(self, request: RunRequest, saved: Checkpoint | None = None) -> None:
        """Take a run in, from its beginning or from where a checkpoint of it was taken.

        Raises RunUnsupported for what the batch does not do, RunTooLarge for what it has no room
        for, and RunRefused for what is wrong.
        """
        if request.run_id in self._waiting or request.run_id in self._active:
            raise RunRefused(f"there is a run {request.run_id} already", param="run_id")
        lack = unsupported(request.settings)
        if lack is not None:
            raise RunUnsupported(f"{lack.field}: {lack.reason}", param=lack.field)
        request.settings.check()
        size, are_prompts = request.settings.rows_per_example, request.settings.samples is not None
        request.rows.check(self._model.config, size, are_prompts=are_prompts)
        layout = AdapterLayout(self._model.config, request.settings)
        layout.check_targets(self._model.config)
        if layout.size > self._spans.capacity:
            problem = f"it has {layout.size} parameters; there is room for {self._spans.capacity}"
            raise RunTooLarge(problem, param="rank")
        if request.held_out is not None:
            request.held_out.check(self._model.config, size, are_prompts=are_prompts)
        if saved is not None:
            checkpoint.check(saved, request, self._model.config)
        if request.adapter is not None:
            layout.check(request.adapter)
        self._waiting[request.run_id] = _Waiting(request, layout, saved)
        self._scheduler.add(request.run_id, request.tenant)

    def cancel(self, run_id: str) -> None:
        """End a run before the next micro-batch; one that has ended already stays so."""
        if run_id in self._waiting:
            saved = self._waiting.pop(run_id).saved
            self._initial.drop(run_id)
            step, tokens = (saved.step, saved.tokens) if saved else (0, 0)
            self._scheduler.remove(run_id)
            self._events.append(
                RunEnded(run_id=run_id, outcome="cancelled", step=step, tokens=tokens)
            )
        elif run_id in self._active:
            self._end(self._active[run_id], "cancelled")

    def checkpoint(self, run_id: str) -> Checkpoint | None:
        """Return a running run's state after its last optimiser step; None: it is not running."""
        run = self._active.get(run_id)
        return None if run is None else checkpoint.take(run, self._pools, self._model.between)

    def step(self) -> list[Event]:
        """Train one micro-batch: begin runs, pack, forward and backward, update, report.

        Or read one: of those whose turn it is some may have made a step that is validated, or
        begin with the log-probabilities of their start.
        """
        self._begin_runs()
        ready = {name: run for name, run in self._active.items() if not run.awaits_samples}
        sizes = {run_id: run.piece.num_tokens for run_id, run in ready.items()}
        kinds = {run_id: run.is_read_only for run_id, run in ready.items()}
        config = self._config
        chosen = self._scheduler.select(sizes, config.token_budget, config.runs_a_pass, kinds)
        runs = [self._active[run_id] for run_id in chosen]
        if runs and runs[0].is_read_only:
            self._read_pieces(runs)
        elif runs:
            self._pass_pieces(runs)
            self._update([run for run in runs if run.is_step_whole])
        events, self._events = self._events, []
        return events

    @property
    def is_idle(self) -> bool:
        """Return whether all runs wait for samples: a step would do nothing."""
        waits = all(run.awaits_samples for run in self._active.values())
        return bool(self._active) and waits and not self._waiting and not self._events

    def adapter(self, run_id: str) -> dict[str, torch.Tensor]:
        """Return a running run's adapter after its last step, by PEFT's names, on the host."""
        run = self._active[run_id]
        return run.layout.tensors(to_host(self._pools.master[run.span.elements]))

    def give_samples(self, run_id: str, samples: Samples) -> None:
        """Let a run that awaits samples continue with them.

        Those of held-out prompts are only judged: the best state has the highest reward.
        """
        run = self._active[run_id]
        if run.validation is not None and run.is_validating:
            run.validation.pass_samples(samples)
            self._conclude(run, run.validation)
        else:
            run.give_samples(samples)

    def _want_samples(self, run: ActiveRun) -> None:
        if run.awaits_samples:
            self._events.append(
                SamplesWanted(
                    run_id=run.request.run_id,
                    step=run.step,
                    examples=run.examples,
                    is_validation=run.is_validating,
                )
            )

    def close(self) -> None:
        """End every run that is left; the last step reports them."""
        for run_id in [*self._waiting, *self._active]:
            self.cancel(run_id)

    def check_integrity(self) -> None:
        """Assert that what is kept agrees."""
        self._spans.check_integrity()
        assert self._spans.used == sum(run.span.size for run in self._active.values())
        for run in self._active.values():
            is_over = run.is_finished or run.is_step_whole
            assert run.is_validating or run.awaits_samples or not is_over
        if not self._active:
            assert not self._pools.master.any() and not self._pools.gradient.any()

    def _begin_runs(self) -> None:
        """Let runs take part for as long as the next one finds room: none goes before it.

        Those that take part do not wait until its adapter is drawn.
        """
        while len(self._active) < self._config.max_runs:
            self._draw_ahead()
            run_id = self._scheduler.next_waiting()
            if run_id is None or not self._is_drawn(run_id):
                return
            span = self._spans.take(self._waiting[run_id].layout.size)
            if span is None:
                return
            self._begin(self._waiting.pop(run_id), span)

    def _draw_ahead(self) -> None:
        """Begin to draw the adapters of those that wait the longest."""
        for run_id, waiting in self._waiting.items():
            if not self._initial.has_room:
                return
            if waiting.saved is None and waiting.request.adapter is None:
                self._initial.expect(run_id, waiting.layout, waiting.request.settings.seed)

    def _is_drawn(self, run_id: str) -> bool:
        waiting, initial = self._waiting[run_id], self._initial
        is_given = waiting.saved is not None or waiting.request.adapter is not None
        if is_given or not self._active or not initial.is_beside_steps:
            return True
        return initial.is_drawn(run_id, waiting.layout, waiting.request.settings.seed)

    def _begin(self, waiting: _Waiting, span: Span) -> None:
        request, layout, saved = waiting.request, waiting.layout, waiting.saved
        master = self._pools.master
        if saved is not None:
            checkpoint.restore(saved, self._pools, span, self._model.between)
        elif request.adapter is not None:
            layout.fill(master, span.first, request.adapter)
        else:
            seed = request.settings.seed
            drawn = self._initial.take(request.run_id, layout, seed)
            copy_in_pieces(master[span.elements], drawn, self._model.between)
        self._pools.values[span.elements].copy_(master[span.elements])
        run = ActiveRun(
            request,
            layout,
            span,
            budget=self._config.token_budget,
            step=saved.step if saved else 0,
            tokens=saved.tokens if saved else 0,
        )
        if saved is not None:
            checkpoint.restore_run(saved, run)
        self._active[request.run_id] = run
        self._scheduler.begin(request.run_id)
        self._events.append(
            RunStarted(
                run_id=request.run_id,
                step=run.step - run.is_validating,
                tokens=run.tokens,
                num_parameters=layout.num_values,
            )
        )
        if run.is_finished and not run.is_validating:
            self._end(run, "finished")
        else:
            self._want_samples(run)

    def _pass_pieces(self, runs: list[ActiveRun]) -> None:
        """Add the gradients of these runs' next rows."""
        batch = pack([run.piece for run in runs], self._model.device)
        sites = self._tables.of([(run.layout, run.span) for run in runs])
        losses = self._model.backward(batch, sites, self._pools)
        for run, figures in zip(runs, batch.measure(losses), strict=True):
            run.pass_piece(figures)

    def _update(self, runs: Iterable[ActiveRun]) -> None:
        """Make the optimiser step of runs whose rows have all gone through; end who is done."""
        due = list(runs)
        steps = [run.update() for run in due]
        norms = adamw(self._pools, steps).tolist() if due else []
        for run, made, norm in zip(due, steps, norms, strict=True):
            for what, value in (("loss", run.figures["loss"]), ("gradient's norm", norm)):
                if not math.isfinite(value):
                    self._end_diverged(run, RunDiverged(made.step, what))
                    break
            else:
                self._go_on(run, made, norm)

    def _end_diverged(self, run: ActiveRun, error: RunDiverged) -> None:
        """End a run with its best state, or with the error if there is none."""
        if run.validation is not None and run.validation.best is not None:
            self._end(run, "finished")
        else:
            self._end(run, "failed", error)

    def _go_on(self, run: ActiveRun, update: RunStep, norm: float) -> None:
        """Plan the next step, and report the one that was made, or have it validated first."""
        rewards = dict(run.figures)
        made = StepMade(rewards.pop("loss"), update.lr, norm, rewards)
        run.end_step()
        if run.validation is not None and run.validation.is_due(run.step):
            run.validation.begin(made)
            self._want_samples(run)
            return
        self._report(run, made)
        if run.is_finished:
            self._end(run, "finished")
        else:
            self._want_samples(run)

    def _read_pieces(self, runs: list[ActiveRun]) -> None:
        """Add the figures of these runs' next held-out rows, or those of their start."""
        batch = pack([run.piece for run in runs], self._model.device)
        sites = self._tables.of([(run.layout, run.span) for run in runs])
        losses = self._model.token_losses(batch, sites, self._pools)
        told = zip(runs, batch.measure(losses), batch.log_probabilities(losses), strict=True)
        for run, figures, log_probabilities in told:
            if run.reference is not None and not run.reference.is_whole:
                run.reference.pass_piece(log_probabilities)
                continue
            assert run.validation is not None
            run.validation.pass_piece(figures)
            if run.validation.is_whole:
                self._conclude(run, run.validation)

    def _conclude(self, run: ActiveRun, validation: Validation) -> None:
        """Keep a state that is the best, report the step, end who is done or gets no better."""
        made, loss, is_best = validation.conclude(run.step)
        if is_best:
            trained = self._pools.master[run.span.elements]
            validation.best = to_host(trained, self._model.between)
        self._report(run, made, loss if math.isfinite(loss) else None, validation.rewards)
        if run.is_finished or validation.is_over:
            self._end(run, "finished")
        else:
            self._want_samples(run)

    def _report(
        self,
        run: ActiveRun,
        made: StepMade,
        validation_loss: float | None = None,
        validated: Mapping[str, float] | None = None,
    ) -> None:
        """Report an optimiser step."""
        held_out = {f"validation_{name}": value for name, value in (validated or {}).items()}
        self._events.append(
            RunProgress(
                run_id=run.request.run_id,
                step=run.step,
                loss=made.loss,
                learning_rate=made.learning_rate,
                grad_norm=made.grad_norm,
                tokens=run.tokens,
                validation_loss=validation_loss,
                rewards=made.rewards | held_out,
                best_step=run.validation.best_step if run.validation else None,
                best_loss=run.validation.best_loss if run.validation else None,
            )
        )

    def _end(self, run: ActiveRun, outcome: Outcome, error: TrainingError | None = None) -> None:
        """Report a run's end and take its place back."""
        adapter, validation = None, run.validation
        if outcome == "finished":
            trained = None if validation is None else validation.best
            if trained is None:
                trained = to_host(self._pools.master[run.span.elements], self._model.between)
            adapter = run.layout.tensors(trained)
        run_id = run.request.run_id
        del self._active[run_id]
        self._scheduler.remove(run_id)
        clear(self._pools, run.span)
        self._spans.give(run.span)
        self._events.append(
            RunEnded(
                run_id=run_id,
                outcome=outcome,
                step=run.step,
                tokens=run.tokens,
                adapter=adapter,
                best_step=validation.best_step if validation else None,
                best_loss=validation.best_loss if validation else None,
                error=error,
            )
        )
