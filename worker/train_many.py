"""Fine-tune many LoRA adapters over one base in one batch.

    python -m worker.train_many CHECKPOINTS JOB.json [JOB.json …]

Each JOB.json is a job of `worker.train`. Standard output carries one JSON object per line: the
events of `worker.train`, each with `run`, the path of the job as it was given, before the others.
Every run has `started`, `progress` … and one `done` or `error`. Besides:

    {"run", "event": "alone", "reason"}     the batch does not do this job; `worker.train` does it,
                                            after the batch
    {"run", "event": "later", "reason"}     the batch has no room for this job, which joined it; the
                                            next one of this process trains it
    started has "resumed_step"              where the run goes on from its checkpoint; its
                                            trained_tokens then count those before, too

With --control, lines on standard input are orders: {"cancel": run} ends a run, with `error`, and no
other; {"pause": run} does, too, but writes its state first, from which it goes on later. The end of
the input is the end of whoever wanted the adapters: as SIGTERM.

With --join, too, {"add": "JOB.json"} has a job join those that are trained, at most --max-runs at a
time, and {"last": true} says that none will any more: before, the process does not end. Where
standard input is a socket, {"add", "lock": true} brings a descriptor, which stays open until the
job has ended.

A job with `judge_dir` has its adapter scored once it is trained, beside the live version, between
the others' steps (`contract.judging`), from its event `judging` to `done`. What of that fails is no
error.

With --worker SOCKET the batch is trained by the serving worker that made the socket
(LORIKEET_TRAINING_SOCKET), over the base that it holds, whenever it has room; this process reads
the rows and writes the files. Jobs that wait for it have a `warning`.

CHECKPOINTS is a folder for what a later process needs to go on; `-`: the folder `checkpoint` beside
each JOB.json, of which there may be one in a folder. Started again with the same
arguments after whatever ended it, each run goes on from its last checkpoint, at most a minute old,
and a run whose adapter is there says `done` again, if its event may have been lost.

Exit codes: 0 every run is done · 1 a defect · 2 a job or its data are wrong · 4 the disk is full ·
143 stopped by SIGTERM or SIGINT, after every run was saved. docs/training.md explains the batch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from contract.training import JobError, TrainJob
from worker.batch_training.arrivals import Arrivals
from worker.batch_training.orders import read_orders
from worker.train import DISK_FULL, EventLog, Stopped, is_disk_full, take_stdout

if TYPE_CHECKING:
    from worker.batch_training.away import AwayTraining
    from worker.batch_training.disk import CheckpointFolder
    from worker.batch_training.jobs import NamedJob
    from worker.batch_training.loop import BatchTraining

_CHECKPOINT_S = 60.0
#: A job with more bytes of rows is trained alone: the batch has all its jobs' rows in memory.
_MAX_ROWS_BYTES = 64 << 20


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker.train_many")
    parser.add_argument("checkpoints", type=Path, help="a folder that a later process goes on from")
    parser.add_argument("jobs", nargs="+", help="files as `python -m worker.train` takes them")
    parser.add_argument("--token-budget", type=int, help="tokens of a micro-batch")
    parser.add_argument("--max-runs", type=int, help="runs that take part at a time")
    parser.add_argument("--checkpoint-s", type=float, default=_CHECKPOINT_S)
    parser.add_argument("--worker", type=Path, help="the socket of a serving worker that trains")
    parser.add_argument("--control", action="store_true", help="obey lines on standard input")
    parser.add_argument("--join", action="store_true", help="wait for jobs that --control adds")
    return parser.parse_args(given)


class TrainMany:
    """One process's work: the jobs base by base, first in the batch, then those it does not do."""

    def __init__(self, options: argparse.Namespace, log: EventLog) -> None:
        self._options, self._log = options, log
        self._is_wrong = False
        self._batch: BatchTraining | AwayTraining | None = None
        self._cancelled: set[str] = set()
        self._paused: set[str] = set()
        self._alone: tuple[str, subprocess.Popen[str]] | None = None
        self._folder: CheckpointFolder
        self._arrivals = Arrivals(dict.fromkeys(options.jobs), is_open=options.join)
        self._outputs: dict[str, Path] = {}  # of the jobs that have not ended
        self._ended: set[str] = set()
        self._locks: dict[str, int] = {}
        #: Jobs that were read: of each base those that wait for a batch, and those for none.
        self._waiting: dict[Path, list[NamedJob]] = {}
        self._for_alone: list[NamedJob] = []

    def run(self) -> int:
        """Train everything; return the exit code."""
        # Imported here: wrong arguments are refused before the seconds that torch takes to start.
        from worker.batch_training.disk import CheckpointFolder

        root: Path = self._options.checkpoints
        self._folder = CheckpointFolder(None if str(root) == "-" else root)
        while True:
            self._read_arrivals()
            if self._waiting:
                self._train_together(min(self._waiting))
            elif self._for_alone:
                self._train_alone(self._for_alone.pop(0).name)
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
        alone = self._alone
        if alone is not None and alone[0] == run:
            alone[1].terminate()

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
        """Read the jobs that have come; say what becomes of those that no batch trains."""
        from worker.batch_training.jobs import NamedJob

        for name in self._arrivals.take():
            result = self._folder.load_result(name)
            try:
                if result is not None and Path(result["output"]).exists():
                    self._emit(name, "done", **result)
                    self._folder.drop(name)
                    continue
                job = TrainJob.read(Path(name))
                if job.output_dir.resolve() in self._outputs.values():
                    raise JobError("output_dir", "another job has the same")
            except JobError as error:
                self._fail(name, error)
                continue
            self._outputs[name] = job.output_dir.resolve()
            named = NamedJob(name, job)
            reason = _not_in_the_batch(job)
            if reason is None:
                self._waiting.setdefault(job.base_model_dir, []).append(named)
            else:
                self._leave_alone([named], reason)

    def _leave_alone(self, jobs: Iterable[NamedJob], reason: str) -> None:
        """Have `worker.train` do jobs, after the batches."""
        for named in jobs:
            self._for_alone.append(named)
            self._emit(named.name, "alone", reason=reason)

    @property
    def may_join(self) -> bool:
        """Whether jobs may still join those that are trained."""
        return self._arrivals.may_come and not self._waiting and not self._for_alone

    def wait(self) -> None:
        """Wait a moment for a job."""
        self._arrivals.wait()

    def take_waiting(self, base: Path) -> list[NamedJob]:
        """The jobs of a base that have come since it was asked before."""
        self._read_arrivals()
        return self._waiting.pop(base, [])

    def _train_together(self, base: Path) -> None:
        """Train the jobs of one base, and those that join them."""
        from engine.errors import OutOfMemory, UnsupportedModel
        from worker.batch_training.loop import BatchTraining
        from worker.batch_training.remote import TrainerRefuses

        joining = _Joining(self, base)
        together = joining.take()
        try:
            batch = self._batch = self._open(base, together)
            for run in list(self._cancelled):
                batch.cancel(run, pause=run in self._paused)
            batch.run(together, joining)
            self._is_wrong |= batch.failures > 0
            if isinstance(batch, BatchTraining) and batch.left_over:
                self._waiting.setdefault(base, []).extend(batch.left_over)
        except JobError as error:
            for named in joining.taken:
                self._fail(named.name, error)
        except (UnsupportedModel, OutOfMemory) as error:
            self._leave_alone(joining.taken, error.message)
        except TrainerRefuses as error:
            left = [named for named in joining.taken if named.name not in self._ended]
            self._leave_alone(left, f"worker: {error}")
        self._batch = None

    def _open(self, base: Path, together: list[NamedJob]) -> BatchTraining | AwayTraining:
        """What trains these jobs: a serving worker, if one is set, or this process."""
        from worker.batch_training.away import AwayTraining
        from worker.batch_training.base import open_base
        from worker.batch_training.loop import BatchTraining

        options, told = self._options, (self._folder, self._emit, self._options.checkpoint_s)
        if options.worker is not None:
            return AwayTraining(options.worker, base, *told)
        opened = open_base(
            base,
            together,
            token_budget=options.token_budget,
            max_runs=options.max_runs,
            may_join=options.join,
        )
        return BatchTraining(opened.trainer, opened.codec, *told, opened.judge)

    def _train_alone(self, name: str) -> None:
        """Have the present trainer do a job; its events go out as they come."""
        if name in self._cancelled:
            self._fail(name, "it was cancelled")
            return
        with subprocess.Popen(
            [sys.executable, "-m", "worker.train", name], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            self._alone = name, child
            if name in self._cancelled:
                child.terminate()
            try:
                last = ""
                for line in child.stdout:
                    event = json.loads(line)
                    last = event.pop("event")
                    self._emit(name, last, **event)
            except BaseException:
                child.terminate()
                raise
        self._alone = None
        if child.returncode != 0:
            self._is_wrong = True
            if last != "error":
                self._emit(name, "error", message=f"its process ended with {child.returncode}")


class _Joining:
    """The jobs of one base that come while others of it are trained."""

    def __init__(self, work: TrainMany, base: Path) -> None:
        self._work, self._base = work, base
        self.taken: list[NamedJob] = []

    @property
    def may_come(self) -> bool:
        """Also no: who waits for another batch does not wait until nobody joins this one."""
        return self._work.may_join

    def take(self) -> list[NamedJob]:
        jobs = self._work.take_waiting(self._base)
        self.taken += jobs
        return jobs

    def wait(self) -> None:
        self._work.wait()


def _not_in_the_batch(job: TrainJob) -> str | None:
    """Return why the batch does not do a job; None: it does it."""
    from engine.training.run import unsupported
    from worker.batch_training.jobs import settings_of

    lack = unsupported(settings_of(job.hyperparameters))
    if lack is not None:
        return f"{lack.field}: {lack.reason}"
    for name in ("dataset", "validation_dataset"):
        path: Path | None = getattr(job, name)
        if path is not None and path.stat().st_size > _MAX_ROWS_BYTES:
            return f"{name}: it has more than {_MAX_ROWS_BYTES} bytes"
    if job.hyperparameters.checkpoints > 0:
        return "checkpoints: the batch keeps no adapters on the way"
    if job.hyperparameters.quantization is not None:
        return "quantization: the batch's base has all its bits"
    if job.hyperparameters.draft_heads > 0:
        return "draft_heads: the batch trains none"
    return None


def main(given: Iterable[str] = sys.argv[1:]) -> int:
    options = _arguments(list(given))
    log = EventLog(take_stdout())
    work = TrainMany(options, log)
    signal.signal(signal.SIGTERM, work.stop)
    signal.signal(signal.SIGINT, work.stop)
    if options.control:
        threading.Thread(target=work.obey, args=(read_orders(),), daemon=True).start()
    try:
        return work.run()
    except Stopped:
        return 143
    except BrokenPipeError:
        return 1  # whoever wanted the adapters is gone
    except Exception as error:
        traceback.print_exc()
        return DISK_FULL if is_disk_full(error) else 1


if __name__ == "__main__":
    sys.exit(main())
