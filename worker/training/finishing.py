"""Finishing: from a trained LoRA to the adapter's folder. Draft heads, scores, files."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from contract.training.job import JobError
from worker.training.adapter_folder import base_name, write_adapter
from worker.training.base import OpenBase
from worker.training.disk import CheckpointFolder, save_peft
from worker.training.draft_heads import HeadTraining
from worker.training.jobs import NamedJob, PreparedJob
from worker.training.judging import RunScores

CANCELLED = "it was cancelled"


@dataclass(slots=True)
class TrainedLora:
    """A run whose LoRA is trained.

    num_steps  that it was trained
    told       the last progress
    done       the fields of its last event but for the seconds since it `began`
    heads      its draft heads
    """

    prepared: PreparedJob
    adapter: Mapping[str, torch.Tensor]
    num_steps: int
    told: dict[str, Any]
    done: dict[str, Any]
    began: float
    heads: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def named(self) -> NamedJob:
        return self.prepared.named


@dataclass(frozen=True, slots=True)
class _Heads:
    """A run whose draft heads are trained, a pass at a time."""

    trained: TrainedLora
    training: HeadTraining
    passes: Iterator[dict[str, Any]]


class Finishing:
    """Has draft heads trained, scores made and adapters written, beside others' steps.

    base    trains the heads, and scores the adapters of jobs with a `judge_dir`; None: a serving
            worker trains the LoRAs, and nothing here has the base
    writer  writes the adapters
    fail    ends a job with an error: its name, a message, a field
    """

    def __init__(
        self,
        base: OpenBase | None,
        folder: CheckpointFolder,
        writer: ThreadPoolExecutor,
        emit: Callable[..., None],
        fail: Callable[[str, str, str | None], None],
    ) -> None:
        self._base, self._folder, self._writer = base, folder, writer
        self._emit, self._fail = emit, fail
        self._heads: dict[str, _Heads] = {}
        self._unjudged: dict[str, TrainedLora] = {}
        self._written: deque[tuple[TrainedLora, Future[None]]] = deque()

    @property
    def has_work(self) -> bool:
        """Return whether a step would train or score something."""
        return bool(self._heads or self._unjudged)

    def add(self, trained: TrainedLora) -> None:
        """Take over a run that has ended."""
        number = trained.named.job.hyperparameters.draft_heads
        if not number:
            self._judge(trained)
            return
        assert self._base is not None, "no serving worker is given a job with heads"
        training = self._base.train_heads(trained.prepared.request, trained.adapter)
        passes = training.run(number, trained.num_steps)
        self._heads[trained.named.name] = _Heads(trained, training, passes)

    def step(self, *, may_wait: bool) -> None:
        """Make a pass for a run's heads and one for a run's scores; report what is written.

        may_wait  for cases that are still read, because there is nothing else to do
        """
        if self._heads:
            self._train_heads(*next(iter(self._heads.items())))
        if self._base is not None and self._unjudged:
            scores = self._base.judge.step(may_wait=may_wait and not self._heads)
            if scores is not None:
                self._write(self._unjudged.pop(scores.name), scores)
        self.tell()

    def cancel(self, name: str) -> bool:
        """Give up what is left to do for a run. -> whether it has no adapter: its heads are missing

        A run that waits for its scores is written without them.
        """
        if name in self._unjudged:
            self._write_unjudged(name)
        return self._heads.pop(name, None) is not None

    def stop(self) -> None:
        """Write what is trained, without scores, and report it; heads are trained again later."""
        for name in list(self._unjudged):
            self._write_unjudged(name)
        self.tell(wait=True)

    def close(self) -> None:
        if self._base is not None:
            self._base.judge.close()

    def tell(self, *, wait: bool = False) -> None:
        """Report the runs whose adapters are written; with `wait`, all that are to be written."""
        while self._written and (wait or self._written[0][1].done()):
            trained, written = self._written.popleft()
            written.result()
            self._emit(trained.named.name, "done", **trained.done)
            self._folder.drop(trained.named.name)

    def _train_heads(self, name: str, heads: _Heads) -> None:
        try:
            told = next(heads.passes, None)
        except JobError as error:
            del self._heads[name]
            self._fail(name, str(error), error.field)
            return
        if told is None:
            del self._heads[name]
            heads.trained.heads = heads.training.tensors
            self._judge(heads.trained)
        elif told:
            self._emit(name, "draft_heads", **heads.trained.told, **told)

    def _judge(self, trained: TrainedLora) -> None:
        """Have an adapter scored, if its job wants that, and written."""
        name = trained.named.name
        if trained.named.job.judge_dir is None:
            self._write(trained)
        elif self._base is None:
            self._write(trained, RunScores(name, None, "a serving worker trained the batch"))
        else:
            # Before its adapter is there, so that whoever finds that finds the scores, too.
            self._unjudged[name] = trained
            self._emit(name, "judging")
            self._base.judge.add(trained.named, trained.adapter)

    def _write_unjudged(self, name: str) -> None:
        if self._base is not None:
            self._base.judge.drop(name)
        scores = RunScores(name, None, "the batch was stopped, or the run")
        self._write(self._unjudged.pop(name), scores)

    def _write(self, trained: TrainedLora, scores: RunScores | None = None) -> None:
        """Begin to write an adapter, with its scores."""
        trained.done["seconds"] = round(time.monotonic() - trained.began, 1)
        written = self._writer.submit(self._write_now, trained, scores)
        self._written.append((trained, written))

    def _write_now(self, trained: TrainedLora, scores: RunScores | None) -> None:
        job = trained.named.job
        self._folder.save_result(trained.named.name, trained.done)
        tensors = {**trained.adapter, **trained.heads}
        save = functools.partial(save_peft, tensors, job.hyperparameters)
        if scores is None:
            write_adapter(save, base_name(job), job.output_dir)
        else:
            write_adapter(save, base_name(job), job.output_dir, scores.write)


def final_loss(losses: list[float]) -> float:
    """Return the mean loss of the last tenth of the steps."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)
