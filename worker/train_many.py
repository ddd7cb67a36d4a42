"""Fine-tune many LoRA adapters over one base in one batch.

    python -m worker.train_many CHECKPOINTS JOB.json [JOB.json …]

Each JOB.json is a job of `worker.train`. Standard output carries one JSON object per line: the
events of `worker.train`, each with `run`, the path of the job as it was given, before the others.
Every run has `started`, `progress` … and one `done` or `error`. Besides:

    {"run", "event": "alone", "reason"}     the batch does not do this job; `worker.train` does it,
                                            after the batch
    started has "resumed_step"              where the run goes on from its checkpoint; its
                                            trained_tokens then count those before, too

With --control, lines on standard input are orders: {"cancel": run} ends a run, with `error`, and no
other; {"pause": run} does, too, but writes its state first, from which it goes on later. The end of
the input is the end of whoever wanted the adapters: as SIGTERM.

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
import itertools
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

    def run(self) -> int:
        """Train everything; return the exit code."""
        # Imported here: wrong arguments are refused before the seconds that torch takes to start.
        from worker.batch_training.disk import CheckpointFolder

        root: Path = self._options.checkpoints
        folder = CheckpointFolder(None if str(root) == "-" else root)
        jobs = self._read(folder)
        alone: list[NamedJob] = []
        for base, group in itertools.groupby(
            sorted(jobs, key=lambda job: str(job.job.base_model_dir)),
            key=lambda job: job.job.base_model_dir,
        ):
            alone += self._train_together(base, list(group), folder)
        for named in alone:
            if named.name in self._cancelled:
                self._fail(named.name, "it was cancelled")
            else:
                self._train_alone(named.name)
        return 2 if self._is_wrong else 0

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal: the batch ends between two micro-batches, all else at once."""
        if self._batch is None:
            raise Stopped
        self._batch.stop()

    def obey(self, orders: Iterable[str]) -> None:
        """Do what the lines say until they end; in a thread of its own."""
        for line in orders:
            for order, run in json.loads(line).items():
                self.cancel(str(run), pause=order == "pause")
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

    def _fail(self, run: str, error: JobError | str) -> None:
        self._is_wrong = True
        told = {"field": error.field} if isinstance(error, JobError) else {}
        self._emit(run, "error", message=str(error), **told)

    def _read(self, folder: CheckpointFolder) -> list[NamedJob]:
        """The jobs that are still to be done; says what becomes of the others."""
        from worker.batch_training.jobs import NamedJob

        jobs: list[NamedJob] = []
        outputs: set[Path] = set()
        for name in dict.fromkeys(self._options.jobs):
            result = folder.load_result(name)
            try:
                if result is not None and Path(result["output"]).exists():
                    self._emit(name, "done", **result)
                    folder.drop(name)
                    continue
                job = TrainJob.read(Path(name))
                if job.output_dir.resolve() in outputs:
                    raise JobError("output_dir", "another job has the same")
            except JobError as error:
                self._fail(name, error)
                continue
            outputs.add(job.output_dir.resolve())
            jobs.append(NamedJob(name, job))
        return jobs

    def _train_together(
        self, base: Path, jobs: list[NamedJob], folder: CheckpointFolder
    ) -> list[NamedJob]:
        """Train the jobs of one base; return those that the batch does not do."""
        from engine.errors import OutOfMemory, UnsupportedModel
        from worker.batch_training.remote import TrainerRefuses

        reasons = _not_in_the_batch(jobs)
        together = [named for named in jobs if named.name not in reasons]
        try:
            if together:
                self._batch = self._open(base, together, folder)
                for run in list(self._cancelled):
                    self._batch.cancel(run, pause=run in self._paused)
                self._batch.run(together)
                self._is_wrong |= self._batch.failures > 0
                self._batch = None
        except JobError as error:
            for named in together:
                self._fail(named.name, error)
        except (UnsupportedModel, OutOfMemory) as error:
            reasons |= {named.name: error.message for named in together}
        except TrainerRefuses as error:
            reasons |= {named.name: f"worker: {error}" for named in together}
        for name, reason in reasons.items():
            self._emit(name, "alone", reason=reason)
        return [named for named in jobs if named.name in reasons]

    def _open(
        self, base: Path, together: list[NamedJob], folder: CheckpointFolder
    ) -> BatchTraining | AwayTraining:
        """What trains these jobs: a serving worker, if one is set, or this process."""
        from worker.batch_training.away import AwayTraining
        from worker.batch_training.base import open_base
        from worker.batch_training.loop import BatchTraining

        options = self._options
        if options.worker is not None:
            return AwayTraining(options.worker, base, folder, self._emit, options.checkpoint_s)
        opened = open_base(
            base, together, token_budget=options.token_budget, max_runs=options.max_runs
        )
        return BatchTraining(opened.trainer, opened.codec, folder, self._emit, options.checkpoint_s)

    def _train_alone(self, name: str) -> None:
        """Have the present trainer do a job; its events go out as they come."""
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


def _not_in_the_batch(jobs: Iterable[NamedJob]) -> dict[str, str]:
    """The jobs that the batch does not do, and why."""
    from engine.training.run import unsupported
    from worker.batch_training.jobs import settings_of

    reasons: dict[str, str] = {}
    for named in jobs:
        lack = unsupported(settings_of(named.job.hyperparameters))
        if lack is not None:
            reasons[named.name] = f"{lack.field}: {lack.reason}"
        elif (reason := _alone(named.job)) is not None:
            reasons[named.name] = reason
    return reasons


def _alone(job: TrainJob) -> str | None:
    """Return why the batch does not do a job whose settings it does; None: it does it."""
    lacks = {
        "validation: the batch does not validate": job.has_validation,
        f"dataset: it has more than {_MAX_ROWS_BYTES} bytes": (
            job.dataset.stat().st_size > _MAX_ROWS_BYTES
        ),
        "checkpoints: the batch keeps no adapters on the way": job.hyperparameters.checkpoints > 0,
        "quantization: the batch's base has all its bits": (
            job.hyperparameters.quantization is not None
        ),
        "warm_start: the batch begins from PEFT's initial adapter": job.warm_start is not None,
    }
    return next((reason for reason, is_so in lacks.items() if is_so), None)


def main(given: Iterable[str] = sys.argv[1:]) -> int:
    options = _arguments(list(given))
    log = EventLog(take_stdout())
    work = TrainMany(options, log)
    signal.signal(signal.SIGTERM, work.stop)
    signal.signal(signal.SIGINT, work.stop)
    if options.control:
        threading.Thread(target=work.obey, args=(sys.stdin,), daemon=True).start()
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
