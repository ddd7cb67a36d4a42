"""The training's side of scoring a run's new adapter in its batch.

Packages above this one define the scores (`judges`). The child reads the definition in the run's
own folder, and writes the scores beside the run's adapter (`contract.training.judging`); nothing of
a run lies in another's folder.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Protocol

from django.conf import settings

from contract.training.judging import BadJudgingFile, BatchScores, read_scores
from controlplane.adapters.models import AdapterVersion
from controlplane.infra import storage
from controlplane.infra.hooks import Hook
from controlplane.training.models import TrainingRun
from controlplane.training.runs import events
from controlplane.training.runs.lease import with_retry

_FOLDER = "judge"
Status = TrainingRun.Status


class Judge(Protocol):
    """Scores of a higher package. It may be repeated, and raises the stores' errors."""

    def wants(self, run: TrainingRun) -> bool:
        """Return whether the run's new version is to be scored."""

    def give(self, run: TrainingRun, folder: Path) -> None:
        """Write the cases for the scores. Raises NothingGiven, storage.ObjectMissing."""

    def take(self, run: TrainingRun, version: AdapterVersion, scores: BatchScores) -> str:
        """Keep the scores of the version. -> the reason against it; "": they are kept."""


class NothingGiven(Exception):
    """Nothing can be scored; the message is for the run's owner."""


judges = Hook[[], Judge]()


def judge_folder(run: TrainingRun, folder: Path) -> Path | None:
    """Write the cases for the scores of the adapter into the folder; None: nothing scores it."""
    path = folder / _FOLDER
    shutil.rmtree(path, ignore_errors=True)
    for judge in judges():
        if not with_retry(run, Status.RUNNING, functools.partial(judge.wants, run)):
            continue
        try:
            if settings.TRAINING_SOCKET:
                raise NothingGiven("a serving worker trains the batch")
            path.mkdir()
            with_retry(run, Status.RUNNING, functools.partial(judge.give, run, path))
        except NothingGiven as error:
            _note(run, Status.RUNNING, str(error))
        except storage.ObjectMissing:
            _note(run, Status.RUNNING, "the files of the live version were deleted")
        else:
            return path
        shutil.rmtree(path, ignore_errors=True)
    return None


def scores_keep(run: TrainingRun, version: AdapterVersion, output: Path) -> None:
    """Keep the scores beside the adapter of a version, if it was to be scored."""
    why_not = ""
    try:
        found = read_scores(output)
    except (BadJudgingFile, OSError) as error:
        found = f"the trainer's scores cannot be read: {error}"
    if found is None and (output.parent / _FOLDER).is_dir():
        found = "the trainer wrote none"
    if isinstance(found, BatchScores):
        for judge in judges():
            take = functools.partial(judge.take, run, version, found)
            why_not = with_retry(run, Status.PUBLISHING, take)
    elif found is not None:
        why_not = found
    if why_not:
        _note(run, Status.PUBLISHING, why_not)


def _note(run: TrainingRun, status: TrainingRun.Status, why_not: str) -> None:
    message = f"The batch scored no expected answers, so the gate asks serving workers: {why_not}"
    with_retry(run, status, lambda: events.event_add(run, message))
