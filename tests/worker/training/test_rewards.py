"""A job of rewards from its prompts to its adapter: sampled answers, rewards, and refusals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import pytest

from contract.training.rewards import Asked, Rewards, read_answers, write_rewards
from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.worker.training.job_runs import Event, Heard, write_job, write_rows
from worker.child import EventLog
from worker.train import Training, _open_folder

GRADER = {"type": "string_check", "input": "{{ sample.output_text }}", "reference": "a",
          "operation": "like"}  # fmt: skip
HYPER: dict[str, Any] = {
    "method": "reinforcement", "grader": GRADER, "samples": 8, "max_tokens": 6, "max_steps": 16,
    "batch_size": 4, "learning_rate": 0.05,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base") / TINY_NAME)


def prompt(number: int, **item: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"hello {number}"}], **item}


def job(folder: Path, base: Path, rows: list[Any], **hyper: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "rewards").mkdir(exist_ok=True)
    path = write_job(folder, base, write_rows(folder / "prompts.jsonl", rows), **hyper)
    fields = json.loads(path.read_text()) | {"rewards_dir": str(folder / "rewards")}
    path.write_text(json.dumps(fields))
    return path


def reward(asked: Asked) -> Rewards:
    """Vowels and digits are good ones."""
    liked = [sum(c in "aeiou0123456789" for c in answer.text) for answer in asked.answers]
    rewards = [
        number / max(1, len(answer.text))
        for number, answer in zip(liked, asked.answers, strict=True)
    ]
    return Rewards(rewards, {"reward_vowels": sum(rewards) / len(rewards)})


def run_graded(path: Path) -> list[Event]:
    folder = path.parent / "rewards"

    def react(event: Event) -> None:
        if event["event"] == "answers":
            asked = read_answers(folder / event["file"])
            write_rewards(folder, asked, reward(asked))

    log = Heard(react)
    options = argparse.Namespace(
        **{"checkpoints": None, "jobs": [str(path)], "token_budget": None, "max_runs": None},
        **{"checkpoint_s": 60.0, "worker": None, "join": False},
    )
    with _open_folder(options) as states:
        Training(options, cast(EventLog, log), states).run()
    return log.events


def test_rewards_rise_and_the_sampler_agrees_with_the_trainer(tmp_path: Path, base: Path) -> None:
    rows = [prompt(number) for number in range(10)]
    events = run_graded(job(tmp_path, base, rows, **HYPER, validation_share=0.3, eval_steps=8))
    steps = [event for event in events if event["event"] == "progress"]
    assert events[-1]["event"] == "done", events[-1]
    assert [step["step"] for step in steps] == list(range(1, 17))
    for step in steps:
        assert step["mismatch"] < 1e-4 and step["mismatch_share"] == 0
        assert step["entropy"] > 0 and step["reward_vowels"] == step["reward"]
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-4) and steps[-1]["kl"] > 0
    rewards = [step["reward"] for step in steps]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
    assert steps[-1]["validation_loss"] == -steps[-1]["validation_reward"]
    assert not list((tmp_path / "rewards").iterdir())
