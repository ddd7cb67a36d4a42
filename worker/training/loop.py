"""The loop behind `worker.train`: jobs into the batch, its events and adapters out.

Start reading at `BatchTraining.run`.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from safetensors import SafetensorError

from contract.training.job import JobError
from engine.text.codec import TextCodec
from engine.training.checkpoint import Checkpoint
from engine.training.errors import RunTooLarge, TrainingError
from engine.training.events import Event, RunEnded, RunProgress, RunStarted, SamplesWanted
from engine.training.run import RunRequest
from worker.child import Stopped
from worker.training.arrivals import MoreJobs, NoMoreJobs
from worker.training.base import OpenBase
from worker.training.chat_data import DatasetError
from worker.training.device import device_name, peak_memory_bytes
from worker.training.disk import CheckpointFolder, SavedRun, reason
from worker.training.finishing import CANCELLED, Finishing, TrainedLora, final_loss
from worker.training.jobs import NamedJob, PreparedJob, kept_steps, prepare
from worker.training.kept_adapters import KeptAdapters

#: emit(run, event, **fields)
Emit = Callable[..., None]
#: Jobs whose rows are being read, or were and are not in the batch yet.
_READ_AHEAD = 4
#: Number of validation losses before a checkpoint that are told; older ones are left out.
_SHOWN_LOSSES = 256
#: What the trainer calls a part of a run -> the field of the job that it comes from.
_FIELDS = {"adapter": "warm_start"}


class Trains(Protocol):
    """The part of `BatchTrainer` that the loop uses; `RemoteTrainer` has it, too."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: RunRequest, saved: Checkpoint | None = None) -> None: ...
    def cancel(self, run_id: str) -> None: ...
    def checkpoint(self, run_id: str) -> Checkpoint | None: ...
    def step(self) -> list[Event]: ...


@dataclass(slots=True)
class _Run:
    """A job in the batch.

    losses      of its steps, validated: [step, loss] of the validations before it took part
    told        the last progress
    kept        steps after which its adapter is kept
    began       when it took part, by the monotonic clock
    first_step  the steps that it had made then, first_tokens the tokens
    saved_at    when its last checkpoint was taken
    """

    prepared: PreparedJob
    losses: list[float] = field(default_factory=list)
    validated: list[list[float]] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)
    first_step: int = 0
    first_tokens: int = 0
    began: float = 0.0
    saved_at: float = 0.0


class BatchTraining:
    """Trains jobs of one base in one batch.

    checkpoint_s  a run's checkpoint is older than this only while another's is being written
    base          trains draft heads, and scores the adapters of jobs with a `judge_dir`; None: the
                  trainer is in another process
    failures      jobs that ended with an error of their own
    left_over     jobs that the trainer has no room for, whoever else ends
    """

    def __init__(
        self,
        trainer: Trains,
        codec: TextCodec,
        folder: CheckpointFolder,
        emit: Emit,
        checkpoint_s: float,
        base: OpenBase | None = None,
    ) -> None:
        self._trainer, self._codec, self._base = trainer, codec, base
        self._folder, self._emit, self._checkpoint_s = folder, emit, checkpoint_s
        self._runs: dict[str, _Run] = {}
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._writing: tuple[str, int, Future[None]] | None = None
        self._is_warned = False  # that a state could not be written
        self._kept = KeptAdapters(self._writer, self._tell)
        self._finishing = Finishing(base, folder, self._writer, emit, self._fail)
        self._rollouts = None if base is None else base.rollouts
        if self._rollouts is not None:
            self._rollouts.emit = emit
        self._faults: dict[str, str] = {}  # why runs' answers cannot be sampled or rewarded
        self._is_stopped = False
        self._cancelled: set[str] = set()
        self._paused: set[str] = set()
        self._step_began = 0.0
        self.failures = 0
        self.left_over: list[NamedJob] = []

    def run(self, jobs: Iterable[NamedJob], more: MoreJobs | None = None) -> None:
        """Train all jobs to their ends, and those that join them; events go to `emit`.

        Raises Stopped after `stop`, and BrokenPipeError when nobody reads the events any more: then
        every run's state is on the disk.
        """
        reader = ThreadPoolExecutor(1, "rows")
        try:
            self._train(deque(jobs), reader, more or NoMoreJobs())
        except (Stopped, BrokenPipeError):
            with contextlib.suppress(BrokenPipeError):
                self._finishing.stop()
            self._save_all()
            raise
        finally:
            reader.shutdown(cancel_futures=True)
            self._finishing.close()
            if self._rollouts is not None:
                self._rollouts.close()
            self._writer.shutdown()

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        """Let `run` end after the micro-batch that is under way."""
        self._is_stopped = True

    def cancel(self, name: str, *, pause: bool = False) -> None:
        """End a job with an error after the current micro-batch; the others are not affected.

        Other threads may call it, for a job that has not come yet, too.
        pause  keep its state, that of its last step
        """
        if pause:
            self._paused.add(name)
        self._cancelled.add(name)

    def _train(self, left: deque[NamedJob], reader: ThreadPoolExecutor, more: MoreJobs) -> None:
        ahead: deque[tuple[NamedJob, Future[PreparedJob]]] = deque()
        while True:
            if self._is_stopped:
                raise Stopped
            left.extend(more.take())
            if not (left or ahead or self._has_work):
                self._kept.tell(wait=True)
                self._finishing.tell(wait=True)
                self._finish_writing()
                if self.left_over or not more.may_come:
                    return
                more.wait()
                continue
            while left and len(ahead) < _READ_AHEAD:
                job = left.popleft()
                ahead.append((job, reader.submit(prepare, job, self._codec)))
            # Rows are waited for only when there is nothing else to do.
            while ahead and (ahead[0][1].done() or not self._has_work):
                self._add(*ahead.popleft())
            self._cancel()
            self._step_began = time.monotonic()
            for event in self._trainer.step():
                self._report(event)
            self._kept.tell()
            self._finishing.step(may_wait=not self._trainer.has_work)
            self._step_rollouts()
            self._save_the_oldest()

    def _step_rollouts(self) -> None:
        """Make a step of the engine that samples for runs of rewards."""
        if self._rollouts is None or self._base is None:
            return
        may_wait = self._base.trainer.is_idle and not self._finishing.has_work
        for name, problem in self._rollouts.step(may_wait=may_wait):
            self._faults[name] = problem
            self._trainer.cancel(name)

    @property
    def _has_work(self) -> bool:
        return self._trainer.has_work or self._finishing.has_work

    def _cancel(self) -> None:
        """Drop the runs that are to end."""
        for name in list(self._cancelled):  # a copy: another thread adds to it
            if name in self._runs:
                if name in self._paused:
                    self._save(name)
                self._trainer.cancel(name)
            elif self._finishing.cancel(name):
                self._fail(name, CANCELLED)

    def _save_all(self) -> None:
        """Write every run's state, so that the next process resumes from here."""
        self._finish_writing()
        for name in () if self._folder.is_scratch else self._runs:
            self._save(name)

    def _save(self, name: str) -> None:
        """Write a run's state now, unless the one that is written is as new."""
        self._finish_writing()
        saved = self._taken(name, self._runs[name])
        if saved is not None:
            self._begin_writing(name, saved)
            self._finish_writing()

    def _add(self, named: NamedJob, rows: Future[PreparedJob]) -> None:
        """Put a job into the batch: from its checkpoint, if it has one of this very job."""
        if named.name in self._cancelled:
            self._fail(named.name, CANCELLED)
            return
        if named.job.hyperparameters.samples and self._rollouts is None:
            self.left_over.append(named)
            self._emit(named.name, "later", reason="nothing here samples answers")
            return
        try:
            prepared = _prepared(rows)
            saved = self._folder.load(named.name)
            try:
                self._trainer.add(prepared.request, saved.checkpoint if saved else None)
            except TrainingError as error:
                if saved is None or error.param != "checkpoint":
                    raise
                saved = None
                self._trainer.add(prepared.request)
        except RunTooLarge as error:
            self.left_over.append(named)
            self._emit(named.name, "later", reason=error.message)
            return
        except (DatasetError, JobError, TrainingError, OSError) as error:
            field_of = _FIELDS.get(getattr(error, "param", None) or "")
            self._fail(named.name, str(error), field_of or getattr(error, "field", None))
            return
        losses, validated = ([], []) if saved is None else (saved.losses, saved.validated)
        run = self._runs[named.name] = _Run(prepared, losses, validated)
        if named.job.kept_dir is not None:
            number = named.job.hyperparameters.checkpoints
            run.kept = kept_steps(prepared.request.settings.steps, number)

    def _report(self, event: Event) -> None:
        run = self._runs[event.run_id]
        if isinstance(event, RunStarted):
            run.began = run.saved_at = self._step_began
            run.first_step, run.first_tokens = event.step, event.tokens
            fields: dict[str, Any] = {**run.prepared.started}
            fields["trainable_parameters"] = event.num_parameters
            if event.step:
                fields["resumed_step"] = event.step
                if run.validated:
                    fields["validation_losses"] = run.validated[-_SHOWN_LOSSES:]
            self._emit(event.run_id, "started", **fields, device=device_name())
        elif isinstance(event, RunProgress):
            run.losses.append(event.loss)
            self._report_progress(run, event)
        elif isinstance(event, SamplesWanted):
            assert self._rollouts is not None
            self._rollouts.want(run.prepared, event)
        else:
            self._report_end(run, event)

    def _report_progress(self, run: _Run, event: RunProgress) -> None:
        elapsed = time.monotonic() - run.began
        steps = run.prepared.request.settings.steps
        per_step = elapsed / (event.step - run.first_step)
        run.told = {
            "step": event.step,
            "steps": steps,
            "loss": round(event.loss, 4),
            "learning_rate": event.learning_rate,
            "tokens_per_s": round((event.tokens - run.first_tokens) / elapsed, 1),
            "eta_s": round(per_step * (steps - event.step), 1),
            "trained_tokens": event.tokens,
            "memory_bytes": peak_memory_bytes(),
            **_figures(
                validation_loss=event.validation_loss,
                best_step=event.best_step,
                best_loss=event.best_loss,
                **event.rewards,
            ),
        }
        self._emit(event.run_id, "progress", **run.told)
        if event.step in run.kept and (saved := self._trainer.checkpoint(event.run_id)) is not None:
            self._kept.write(run.prepared, run.told, saved)

    def _report_end(self, run: _Run, event: RunEnded) -> None:
        name, job = event.run_id, run.prepared.named.job
        del self._runs[name]
        if self._rollouts is not None:
            self._rollouts.drop(name)
        if event.adapter is None:
            problem = event.error.message if event.error else self._faults.pop(name, CANCELLED)
            field_of = event.error.param if event.error else None
            if field_of:
                field_of = f"hyperparameters.{field_of}"
                problem = f"{field_of}: {problem}"
            self._fail(name, problem, field_of)
            return
        done = {
            "output": str(job.output_dir),
            "final_loss": round(final_loss(run.losses), 4),
            "trained_tokens": event.tokens,
            **_figures(best_step=event.best_step, best_loss=event.best_loss),
        }
        trained = TrainedLora(run.prepared, event.adapter, event.step, run.told, done, run.began)
        self._finishing.add(trained)

    def _fail(self, name: str, message: str, field_of: str | None = None) -> None:
        self.failures += 1
        told = {"field": field_of} if field_of else {}
        self._emit(name, "error", message=message, **told)
        self._finish_writing()
        is_wanted = name in self._paused if name in self._cancelled else self._folder.is_kept
        if not is_wanted:
            self._folder.drop(name)

    def _save_the_oldest(self) -> None:
        """Begin to write the checkpoint that is due the longest, unless one is being written."""
        if self._writing is not None:
            if not self._writing[2].done():
                return
            self._finish_writing()
        began = {name: run for name, run in self._runs.items() if run.began}
        name = min(began, key=lambda name: began[name].saved_at, default=None)
        now = time.monotonic()
        if name is None or now - began[name].saved_at < self._checkpoint_s:
            return
        saved = self._taken(name, began[name])
        if saved is not None:
            began[name].saved_at = now
            self._begin_writing(name, saved)

    def _begin_writing(self, name: str, saved: SavedRun) -> None:
        written = self._writer.submit(self._folder.save, name, saved)
        self._writing = name, saved.checkpoint.step, written

    def _taken(self, name: str, run: _Run) -> SavedRun | None:
        taken = self._trainer.checkpoint(name)
        return None if taken is None else SavedRun(taken, list(run.losses))

    def _finish_writing(self) -> None:
        """Wait for the checkpoint that is being written, and say what became of it."""
        if self._writing is None:
            return
        (name, step, written), self._writing = self._writing, None
        error = written.exception()
        if error is None:
            self._is_warned = False
            self._tell(name, "saved", step=step)
        elif not isinstance(error, OSError | SafetensorError):
            raise error
        elif not self._is_warned:
            self._is_warned = True
            problem = f"the run's state could not be saved: {reason(error)}"
            self._tell(name, "warning", message=problem)

    def _tell(self, name: str, event: str, **fields: Any) -> None:
        """Emit, unless nobody reads any more: then the states are what is left to write."""
        with contextlib.suppress(BrokenPipeError):
            self._emit(name, event, **fields)


def _figures(**given: float | None) -> dict[str, float]:
    """Those that there are, rounded as losses are told."""
    return {name: round(value, 4) for name, value in given.items() if value is not None}


def _prepared(rows: Future[PreparedJob]) -> PreparedJob:
    """Return what was read of a job. Raises DatasetError, JobError, OSError, and nothing else.

    What a row does to code of ours must not end the batch of others.
    """
    try:
        return rows.result()
    except (DatasetError, JobError, OSError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise DatasetError("the rows could not be read; the trainer's log says why") from error
