"""Files through which a run's sampled answers get their rewards.

    REWARDS_DIR/answers-STEP.json   the trainer's: answers to prompts, as `Asked`
    REWARDS_DIR/rewards-STEP.json   in return: a reward for each, as `Rewards`

`STEP` has `-validation` behind it where the prompts are held out. Every file appears whole. The
trainer removes both once it has the rewards; a resumed run asks again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 256 << 20
MAX_FIGURES = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """line  of the prompt in its file; `is_cut`: it has all the tokens that it may have"""

    line: int
    text: str
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """The answers of one step; `group` answers of a prompt follow each other."""

    step: int
    group: int
    answers: list[Answer]
    is_validation: bool = False

    @property
    def name(self) -> str:
        return f"{self.step}{'-validation' if self.is_validation else ''}.json"


@dataclass(frozen=True, slots=True)
class Rewards:
    """figures  by name, told with the step: the means of the graders' scores"""

    rewards: list[float]
    figures: dict[str, float] = field(default_factory=dict)


class BadRewards(ValueError):
    """A file that does not have this format; the message says why."""


def write_answers(folder: Path, asked: Asked) -> Path:
    """Write the answers of a step. -> their file"""
    return _write(folder / f"answers-{asked.name}", dataclasses.asdict(asked))


def read_answers(path: Path) -> Asked:
    """Read what `write_answers` wrote. Raises BadRewards, OSError."""
    found = _read(path)
    try:
        answers = [
            Answer(int(a["line"]), str(a["text"]), bool(a["is_cut"])) for a in found["answers"]
        ]
        asked = Asked(
            int(found["step"]), int(found["group"]), answers, bool(found["is_validation"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRewards(f"answers: {error!r}") from error
    if asked.group < 1 or len(answers) % asked.group:
        raise BadRewards(f"{len(answers)} answers are no groups of {asked.group}")
    return asked


def write_rewards(folder: Path, asked: Asked, rewards: Rewards) -> None:
    """Write the rewards of a step's answers."""
    _write(folder / f"rewards-{asked.name}", dataclasses.asdict(rewards))


def take_rewards(folder: Path, asked: Asked) -> Rewards | None:
    """Read the rewards and remove both files; None: they are not there yet.

    Raises BadRewards, OSError.
    """
    path = folder / f"rewards-{asked.name}"
    if not path.exists():
        return None
    found = _read(path)
    rewards, figures = found.get("rewards"), found.get("figures")
    if not isinstance(rewards, list) or len(rewards) != len(asked.answers):
        raise BadRewards("there is not one reward for each answer")
    if not isinstance(figures, dict) or len(figures) > MAX_FIGURES:
        raise BadRewards("the figures are no object")
    for value in (*rewards, *figures.values()):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise BadRewards("a reward is no finite number")
    for each in (path, folder / f"answers-{asked.name}"):
        each.unlink(missing_ok=True)
    return Rewards([float(value) for value in rewards], figures)


def _write(path: Path, value: dict[str, Any]) -> Path:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    os.replace(part, path)
    return path


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise BadRewards(f"{path.name} has more than {MAX_FILE_BYTES} bytes")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadRewards(f"{path.name} is not JSON") from error
    if not isinstance(found, dict):
        raise BadRewards(f"{path.name} is no object")
    return found
