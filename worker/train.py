"""Fine-tune LoRA adapters from chat JSONL: one, or many over one base in one batch.

    python -m worker.train [--checkpoints FOLDER] JOB.json [JOB.json …]

JOB.json:

    {"base_model_dir": "…",          a Hugging Face folder, with or without lorikeet.json
     "dataset": "chats.jsonl",
     "output_dir": "…",              made when training succeeds; must not exist
     "hyperparameters": {…},         `Hyperparameters`; what is left out takes its default
     "num_threads": 2,               optional; default: PyTorch's choice
     "base_model": "…",              optional: its name; default: what the folder says
     "validation_dataset": "…",      optional: rows to validate with, instead of a share of these
     "salt": "…",                    optional: which rows are in that share
     "warm_start": "….safetensors",  optional: tensors of an adapter to begin from
     "most_steps": 1, "most_tokens": 1,  optional: a longer training is an error
     "kept_dir": "…",                optional: where the adapters of `checkpoints` steps are kept,
                                     each in a folder of its step's number, with metrics.json
     "judge_dir": "…",               optional: expected answers that the adapter is scored by
     "rewards_dir": "…"}             with the method reinforcement: where answers get rewards

Standard output carries one JSON object per line and nothing else. Each has `run`, the path of its
job as it was given. Every run has `started`, `progress` … and one `done` or `error`:

    {"run", "event": "started", "rows", "examples", "truncated_rows", "dropped_rows",
     "validation_rows", "leaked_rows", "tokens", "steps", "trainable_parameters", "device"}
                                    examples: the rows, some in parts; see `row_tokens`
                                    "resumed_step": where it continues from its checkpoint; its
                                    trained_tokens then count those before, too, and
                                    "validation_losses" has those before, [step, loss]
    {"run", "event": "progress", "step", "steps", "loss", "learning_rate", "tokens_per_s", "eta_s",
     "trained_tokens", "memory_bytes", "validation_loss", "best_step", "best_loss"}
                                    the last three, in `done` the last two, when there are rows to
                                    validate with; with the method dpo also "reward_chosen",
                                    "reward_rejected", "reward_margin" and "reward_accuracy" of the
                                    step's pairs, and with `validation_` before of those held out
    {"run", "event": "draft_heads", "draft_head_step", "draft_head_steps", "draft_head_loss",
     "draft_head_accuracy": […], "draft_head_accuracy_untrained": […], "draft_head_accuracy_on"}
                                    with `draft_heads`, after the last step: how far they are; the
                                    last one has their share of right guesses, each head's, on
                                    "validation" or "training" rows. Each has the fields of the last
                                    progress, too
    {"run", "event": "answers", "step", "file"}
                                    with the method reinforcement: answers are in this file of
                                    `rewards_dir`, and their rewards are waited for
    {"run", "event": "judging"}     it is trained, and scored before its adapter is written
    {"run", "event": "done", "output", "final_loss", "trained_tokens", "seconds", "best_step",
     "best_loss"}
    {"run", "event": "saved", "step"}       its state after that step is on the disk
    {"run", "event": "warning", "message"}  what its owner should know; the training continues
    {"run", "event": "later", "reason"}     the next batch of this process trains it
    {"run", "event": "error", "message", "field"}  field: of the job, or "dataset"; else left out

FOLDER has the states from which a later process continues; `-`: the folder `checkpoint` beside each
JOB.json, which then must be the only one in its folder. Started again with the same arguments after
whatever ended it, each run continues from its last checkpoint, at most a minute old, and a run
whose adapter is there says `done` again, if its event may have been lost.

With --control, lines on standard input are orders: {"cancel": run} ends a run, with `error`, and no
other; {"pause": run} does, too, but writes its state first, from which it continues later. The end
of the input is the end of whoever wanted the adapters: as SIGTERM.

With --join, too, {"add": "JOB.json"} has a job join those that are trained, at most --max-runs at a
time, and {"last": true} says that none will any more: before, the process does not end. Where
standard input is a socket, {"add", "lock": true} brings a descriptor, which stays open until the
job has ended.

A job with `judge_dir` has its adapter scored once it is trained, beside the live version, between
the others' steps (`contract.training.judging`), from its event `judging` to `done`. A failure of
the scoring does not fail the run.

With --worker SOCKET the batch is trained by the serving worker that made the socket
(LORIKEET_TRAINING_SOCKET), over the base that it holds, whenever it has room; this process reads
the rows and writes the files. Jobs that wait for it have a `warning`.

Exit codes: 0 every run is done · 1 a defect · 2 a job or its data are wrong · 4 the disk is full ·
143 stopped by SIGTERM or SIGINT, after every run was saved. An output folder appears complete or
not at all. docs/training.md explains the batch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from contract.training.job import JobError, TrainJob
from worker.child import DISK_FULL, EventLog, Stopped, is_disk_full, take_stdout
from worker.training.arrivals import Arrivals
from worker.training.orders import read_orders

if TYPE_CHECKING:
    from worker.training.away import AwayTraining
    from worker.training.disk import CheckpointFolder
    from worker.training.jobs import NamedJob
    from worker.training.loop import BatchTraining

_CHECKPOINT_S = 60.0
#: Size of a job's rows above which a serving worker, which would have them in memory, is not asked.
_MAX_SENT_BYTES = 64 << 20


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker.train")
    parser.add_argument("jobs", nargs="+", help="files that describe a training each")
    parser.add_argument("--checkpoints", help="a folder that a later process continues from")
    parser.add_argument("--token-budget", type=int, help="tokens of a micro-batch")
    parser.add_argument("--max-runs", type=int, help="runs that take part at a time")
    parser.add_argument("--checkpoint-s", type=float, default=_CHECKPOINT_S)
    parser.add_argument("--worker", type=Path, help="the socket of a serving worker that trains")
    parser.add_argument("--control", action="store_true", help="obey lines on standard input")
    parser.add_argument("--join", action="store_true", help="wait for jobs that --control adds")
    return parser.parse_args(given)


class Training:
    """One process's work: the jobs, base by base.

    folder  for the runs' checkpoints
    """

    def __init__(
        self, options: argparse.Namespace, log: EventLog, folder: CheckpointFolder
    ) -> None:
        self._options, self._log, self._folder = options, log, folder
        self._is_wrong = False
        self._batch: BatchTraining | AwayTraining | None = None
        self._cancelled: set[str] = set()
        self._paused: set[str] = set()
        self._arrivals = Arrivals(dict.fromkeys(options.jobs), is_open=options.join)
        self._outputs: dict[str, Path] = {}  # by job, until it ends
        self._ended: set[str] = set()
        self._locks: dict[str, int] = {}
        #: Jobs that were read and wait, by base: for a serving worker if there is one, else for
        #: this process; and those that this process trains in any case.
        self._waiting: dict[Path, list[NamedJob]] = {}
        self._for_here: dict[Path, list[NamedJob]] = {}

    def run(self) -> int:
        """Train everything; return the exit code."""
        while True:
            self._read_arrivals()
            if self._waiting:
                self._train_together(min(self._waiting))
            elif self._for_here:
                base = min(self._for_here)
                self._train_here(_Joining(self, base, self._for_here.pop(base)))
            elif self._arrivals.may_come:
                self.wait()
            else:
                return 2 if self._is_wrong else 0

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: the batch ends between two micro-batches, all else at once."""
        if self._batch is None:
            raise Stopped
        self._batch.stop()

    def obey(self, orders: Iterable[dict[str, Any]]) -> None:
        """Do what the orders say until they end; in a thread of its own."""
        for order in orders:
            lock = order.pop("lock", None)
            for what, run in order.items():
                if what == "add":
                    if lock is not None:
                        self._locks[run] = lock
                    self._arrivals.put(str(run))
                elif what == "last":
                    self._arrivals.end()
                else:
                    self.cancel(str(run), pause=what == "pause")
        os.kill(os.getpid(), signal.SIGTERM)

    def cancel(self, run: str, *, pause: bool = False) -> None:
        """End a run soon, and no other; called in another thread than `run`.

        pause  keep its state
        """
        if pause:
            self._paused.add(run)
        self._cancelled.add(run)
        if self._batch is not None:
            self._batch.cancel(run, pause=pause)

    def _emit(self, run: str, event: str, **fields: Any) -> None:
        self._log.emit(event, run=run, **fields)
        if event in ("done", "error"):
            self._ended.add(run)
            self._outputs.pop(run, None)
            if run in self._locks:
                os.close(self._locks.pop(run))

    def _fail(self, run: str, error: JobError | str) -> None:
        self._is_wrong = True
        told = {"field": error.field} if isinstance(error, JobError) else {}
        self._emit(run, "error", message=str(error), **told)

    def _read_arrivals(self) -> None:
        """Read the jobs that have come."""
        from worker.training.jobs import NamedJob, check_settings

        for name in self._arrivals.take():
            result = self._folder.load_result(name)
            try:
                if result is not None and Path(result["output"]).exists():
                    self._emit(name, "done", **result)
                    self._folder.drop(name)
                    continue
                job = TrainJob.read(Path(name))
                check_settings(job.hyperparameters)
                if job.output_dir.resolve() in self._outputs.values():
                    raise JobError("output_dir", "another job has the same")
            except JobError as error:
                self._fail(name, error)
                continue
            self._outputs[name] = job.output_dir.resolve()
            why_here = None if self._options.worker is None else _not_for_a_worker(job)
            if why_here is None:
                self._waiting.setdefault(job.base_model_dir, []).append(NamedJob(name, job))
            else:
                self._leave_here(job.base_model_dir, [NamedJob(name, job)], why_here)

    def _leave_here(self, base: Path, jobs: Iterable[NamedJob], why: str) -> None:
        """Have jobs trained by this process, after what the serving worker trains."""
        for named in jobs:
            self._for_here.setdefault(base, []).append(named)
            self._emit(named.name, "later", reason=why)

    @property
    def may_join(self) -> bool:
        """Return whether jobs may still join those that are trained."""
        return self._arrivals.may_come and not self._waiting and not self._for_here

    def has_ended(self, name: str) -> bool:
        """Return whether a job has said `done` or `error`."""
        return name in self._ended

    def wait(self) -> None:
        """Wait a moment for a job."""
        self._arrivals.wait()

    def take_waiting(self, base: Path) -> list[NamedJob]:
        """Return the jobs of a base that have come since it was asked before."""
        self._read_arrivals()
        return self._waiting.pop(base, [])

    def _train_together(self, base: Path) -> None:
        """Train the jobs of one base, and those that join them."""
        from worker.training.away import AwayTraining
        from worker.training.remote import TrainerRefuses

        options, joining = self._options, _Joining(self, base)
        if options.worker is None:
            self._train_here(joining)
            return
        told = self._folder, self._emit, options.checkpoint_s
        try:
            self._run(AwayTraining(options.worker, base, *told), joining.take(), joining)
        except JobError as error:
            self._fail_all(joining.left, error)
        except TrainerRefuses as error:
            self._leave_here(base, joining.left, f"worker: {error}")

    def _train_here(self, joining: _Joining) -> None:
        """Train jobs in this process, and those that join them."""
        import torch

        from engine.errors import OutOfMemory, UnsupportedModel
        from worker.training.base import open_base
        from worker.training.loop import BatchTraining

        options, jobs = self._options, joining.take()
        try:
            opened = open_base(
                joining.base,
                jobs,
                token_budget=options.token_budget,
                max_runs=options.max_runs,
                may_join=options.join,
            )
            told = self._folder, self._emit, options.checkpoint_s
            batch = BatchTraining(opened.trainer, opened.codec, *told, opened)
            self._run(batch, jobs, joining)
            self._wait_for_another(joining.base, batch.left_over)
        except JobError as error:
            self._fail_all(joining.left, error)
        except UnsupportedModel as error:
            self._fail_all(joining.left, JobError("base_model_dir", error.message))
        except (OutOfMemory, torch.OutOfMemoryError):
            traceback.print_exc()
            largest, *others = sorted(joining.left, key=_size, reverse=True)
            own = largest.job.gpu_share
            share = "" if own is None else f" (the run may use {own:g} of it)"
            problem = f"the GPU has not enough memory{share}; a smaller max_length takes less"
            self._fail(largest.name, JobError("hyperparameters.max_length", problem))
            self._wait_for_another(joining.base, others)

    def _wait_for_another(self, base: Path, jobs: list[NamedJob]) -> None:
        """Have jobs trained by another batch of this process."""
        if jobs:
            self._for_here.setdefault(base, []).extend(jobs)

    def _fail_all(self, jobs: Iterable[NamedJob], error: JobError) -> None:
        for named in jobs:
            self._fail(named.name, error)

    def _run(
        self, batch: BatchTraining | AwayTraining, jobs: list[NamedJob], joining: _Joining
    ) -> None:
        self._batch = batch
        for run in list(self._cancelled):
            batch.cancel(run, pause=run in self._paused)
        try:
            batch.run(jobs, joining)
        finally:
            self._batch = None
            self._is_wrong |= batch.failures > 0


class _Joining:
    """The jobs of one base that come while others of it are trained; `jobs` came before."""

    def __init__(self, work: Training, base: Path, jobs: Sequence[NamedJob] = ()) -> None:
        self._work, self.base = work, base
        self._jobs = list(jobs)
        self._taken: list[NamedJob] = []

    @property
    def left(self) -> list[NamedJob]:
        """Those that were taken and have not ended."""
        return [named for named in self._taken if not self._work.has_ended(named.name)]

    @property
    def may_come(self) -> bool:
        """Return whether more jobs may come: no longer once some wait for another batch."""
        return self._work.may_join

    def take(self) -> list[NamedJob]:
        jobs = [*self._jobs, *self._work.take_waiting(self.base)]
        self._jobs = []
        self._taken += jobs
        return jobs

    def wait(self) -> None:
        self._work.wait()


def _not_for_a_worker(job: TrainJob) -> str | None:
    """Return why a serving worker does not train a job; None: it does."""
    for name in ("dataset", "validation_dataset"):
        path: Path | None = getattr(job, name)
        if path is not None and path.stat().st_size > _MAX_SENT_BYTES:
            return f"{name}: it has more than {_MAX_SENT_BYTES} bytes, which no worker is sent"
    if job.hyperparameters.samples:
        return "reinforcement: a serving worker samples no answers for it"
    if job.hyperparameters.draft_heads > 0:
        return "draft_heads: a serving worker trains none"
    return None


def _size(named: NamedJob) -> int:
    """Return what grows with the memory that a job takes."""
    hyper = named.job.hyperparameters
    return hyper.rank * len(hyper.target_modules)


@contextlib.contextmanager
def _open_folder(options: argparse.Namespace) -> Iterator[CheckpointFolder]:
    """Yield the folder for the checkpoints; without --checkpoints nothing of it stays."""
    # Imports make no garbage: a fifth of their time would be for a look at it.
    gc.disable()
    from worker.training.disk import CheckpointFolder

    gc.enable()
    if options.checkpoints is not None:
        path = options.checkpoints
        yield CheckpointFolder(None if path == "-" else Path(path))
        return
    options.checkpoint_s = float("inf")
    with tempfile.TemporaryDirectory(prefix="train-") as root:
        yield CheckpointFolder(Path(root), is_scratch=True)


def train(options: argparse.Namespace, log: EventLog) -> int:
    """Train the jobs; return the exit code. Raises Stopped after a signal."""
    with _open_folder(options) as folder:
        work = Training(options, log, folder)
        signal.signal(signal.SIGTERM, work.stop)
        signal.signal(signal.SIGINT, work.stop)
        if options.control:
            threading.Thread(target=work.obey, args=(read_orders(),), daemon=True).start()
        return work.run()


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Stopped


def main(given: Iterable[str] = sys.argv[1:]) -> int:
    options = _arguments(list(given))
    log = EventLog(take_stdout())
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        return train(options, log)
    except Stopped:
        return 143
    except BrokenPipeError:
        return 1  # whoever wanted the adapters is gone
    except Exception as error:
        traceback.print_exc()
        return DISK_FULL if is_disk_full(error) else 1


if __name__ == "__main__":
    sys.exit(main())
