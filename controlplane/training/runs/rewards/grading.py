"""Grading: has a run's sampled answers graded while its trainer waits.

The trainer writes answers into a folder of the run, and says so; a thread here has them graded and
writes their rewards beside them (`contract.training.rewards`). Packages above this one have the
graders (`graders`).
"""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from django.db import connection

from contract.training.rewards import (
    Answer,
    Asked,
    BadRewards,
    Rewards,
    read_answers,
    write_rewards,
)
from controlplane.errors import ApiError
from controlplane.infra.hooks import Hook
from controlplane.infra.outages import DATABASE_OUTAGE
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets import contents
from controlplane.training.models import TrainingRun
from controlplane.training.runs.trainer import TrainingFailed
from controlplane.usage.limits import quotas

log = logging.getLogger(__name__)

REWARDS = "rewards"
_FIELD = "hyperparameters.grader"
#: Answers of a step that are shown, and the most characters of each.
SHOWN, MAX_SHOWN_CHARS = 3, 300
#: Pauses before graders are asked again that could not answer, in seconds.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled answer, and all fields of the row of its prompt."""

    text: str
    item: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Graded:
    """rewards  of each sample; `problem`, for the run's owner: why some got the lowest, or \"\""""

    rewards: Rewards
    problem: str = ""


class Grader(Protocol):
    """Graders of a higher package, for the tenant in scope."""

    def check(self, grader: dict[str, Any]) -> None:
        """Check what a grader names. Raises InvalidRequest, NotFound, with the field."""

    def grade(self, run: TrainingRun, grader: dict[str, Any], samples: Sequence[Sample]) -> Graded:
        """Return the rewards. Raises ApiError: of 5xx and 429 ones it is asked again."""


graders = Hook[[], Grader]()


class Grading:
    """The grading of one attempt at a run. Close it.

    shown    answers of the last graded step, as its owner sees them
    seconds  that it has taken, those of earlier attempts included
    """

    def __init__(self, run: TrainingRun, folder: Path) -> None:
        self._run, self.folder = run, folder / REWARDS
        self._grader: dict[str, Any] = run.hyperparameters.get("grader") or {}
        self._rows = self._held_out = _Rows(folder / "dataset.jsonl")
        if run.validation_sha256:
            self._held_out = _Rows(folder / "validation.jsonl")
        self._thread = ThreadPoolExecutor(1, "grading")
        self._work: Future[None] | None = None
        self._is_closed = self._is_shown = False
        self.shown: list[dict[str, Any]] = []
        self.seconds = float(run.progress.get("grading_s") or 0)
        self.problems: list[str] = []

    def begin(self, name: str) -> None:
        """Have the answers in a file of the folder graded."""
        self._work = self._thread.submit(self._grade, self.folder / Path(name).name)

    def check(self) -> None:
        """Raise TrainingFailed if the answers cannot be graded."""
        if self._work is not None and self._work.done():
            work, self._work = self._work, None
            try:
                work.result()
            except TrainingFailed:
                raise
            except Exception as error:  # the trainer would wait for ever
                log.exception("grading failed", extra={"run_id": str(self._run.pk)})
                raise TrainingFailed(
                    "The server failed as it graded answers: send the operator the run's id.",
                    code="server_error",
                ) from error

    def close(self) -> None:
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)

    def _grade(self, path: Path) -> None:
        began = time.monotonic()
        try:
            with tenant_scope(self._run.tenant_id):
                asked = read_answers(path)
                rows = self._held_out if asked.is_validation else self._rows
                samples = [Sample(each.text, rows.item(each.line)) for each in asked.answers]
                graded = self._ask(samples, began)
                self._note(asked, graded)  # before the trainer, which then makes the step
                write_rewards(self.folder, asked, graded.rewards)
        except (BadRewards, OSError, ValueError) as error:
            raise TrainingFailed(f"The answers cannot be graded: {error}") from error
        finally:
            connection.close()
            self.seconds += time.monotonic() - began

    def _ask(self, samples: Sequence[Sample], began: float) -> Graded:
        """Ask the graders, again while they cannot answer and there is time."""
        (grader,) = graders()
        pause = _FIRST_PAUSE_S
        while True:
            try:
                self._check_time(self.seconds + time.monotonic() - began)
                self._is_shown = not contents.has_requests(self._run.dataset_sha256)
                return grader.grade(self._run, self._grader, samples)
            except DATABASE_OUTAGE as error:
                log.warning("grading waits for the database: %r", error)
                connection.close()
            except ApiError as error:
                if error.status < 500 and error.status != 429:
                    code = error.code or "bad_grader"
                    raise TrainingFailed(error.message, code=code, field=_FIELD) from error
                log.warning("a grader is asked again: %s", error.message)
            self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _check_time(self, seconds: float) -> None:
        if seconds >= (most := quotas.allowed("grading_seconds")):
            raise TrainingFailed(
                f"Grading took {most} seconds, your organization's limit for a run: take fewer "
                "samples, or a faster grader.",
                code="grading_too_long",
                field=_FIELD,
            )

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._is_closed:
            time.sleep(0.1)
        if self._is_closed:
            raise TrainingFailed("The run has ended.")

    def _note(self, asked: Asked, graded: Graded) -> None:
        if graded.problem and graded.problem not in self.problems:
            self.problems.append(graded.problem)
        if asked.is_validation or not self._is_shown:
            return
        pairs = list(zip(asked.answers, graded.rewards.rewards, strict=True))
        chosen = pairs[:: max(1, -(-len(pairs) // SHOWN))]
        self.shown = [_shown(answer, reward) for answer, reward in chosen]


def _shown(answer: Answer, reward: float) -> dict[str, Any]:
    text = answer.text.replace("\0", "\ufffd")
    return {"line": answer.line, "answer": text[:MAX_SHOWN_CHARS], "reward": round(reward, 4)}


class _Rows:
    """The rows of a file, by their lines' numbers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts = array("Q")

    def item(self, line: int) -> dict[str, Any]:
        """Return all fields of a row. Raises ValueError, OSError."""
        with self._path.open("rb") as file:
            if not self._starts:
                self._starts.append(0)
                self._starts.extend(file.tell() for _ in iter(file.readline, b""))
            file.seek(self._starts[line - 1])
            found = json.loads(file.readline().removeprefix(b"\xef\xbb\xbf"))
        if not isinstance(found, dict):
            raise ValueError(f"line {line} is no row")
        return found
