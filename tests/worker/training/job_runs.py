"""Jobs for `worker.train`, and ways to run them: as users do, as a warm fork, in this process."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from contract.training.job import TrainJob
from engine.text.codec import TextCodec
from engine.training.run import RunRequest, RunRows
from tests.trainers import Trainer, start_trainer
from worker.child import EventLog
from worker.train import Training, _open_folder
from worker.training.disk import CheckpointFolder
from worker.training.jobs import NamedJob, prepare

ROOT = Path(__file__).parents[3]
Event = dict[str, Any]
Events = dict[str, list[Event]]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_chats(path: Path, word: str, count: int = 12) -> Path:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"hello {i}" * (i % 5 + 1)},
                {"role": "assistant", "content": word},
            ]
        }
        for i in range(count)
    ]
    return write_rows(path, chats)


def write_job(folder: Path, base: Path, dataset: Path, **hyperparameters: Any) -> Path:
    defaults = {"rank": 4, "alpha": 8, "batch_size": 4, "learning_rate": 0.03, "warmup_steps": 0}
    job = {
        "base_model_dir": str(base),
        "dataset": str(dataset),
        "output_dir": str(folder / "adapter"),
        "hyperparameters": defaults | hyperparameters,
        "num_threads": 1,
    }
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def start(job: Path, *, is_real: bool = False) -> Trainer | subprocess.Popen[str]:
    return start_trainer("worker.train", str(job), is_real=is_real)


def run(job: Path, *, is_real: bool = False) -> tuple[int | None, list[Event], str]:
    """Exit code, events, standard error. Every line of standard output must be an event."""
    with start(job, is_real=is_real) as process:
        stdout, stderr = process.communicate(timeout=120)
    return process.returncode, [json.loads(line) for line in stdout.splitlines()], stderr


class Heard:
    """An event log that keeps what it hears, and then calls `react` with the event."""

    def __init__(self, react: Callable[[Event], None] = lambda event: None) -> None:
        self.events: list[Event] = []
        self.react = react

    def emit(self, event: str, **fields: Any) -> None:
        self.events.append(json.loads(json.dumps({"event": event, **fields})))
        self.react(self.events[-1])

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]


def make_training(jobs: Sequence[Path], log: Heard, checkpoints: Path, **changes: Any) -> Training:
    """What `worker.train` makes of its arguments."""
    options = argparse.Namespace(
        checkpoints=str(checkpoints),
        jobs=[str(job) for job in jobs],
        **{"token_budget": None, "max_runs": None, "checkpoint_s": 1e9, "worker": None},
        join=False,
    )
    vars(options).update(changes)
    return Training(options, cast(EventLog, log), CheckpointFolder(checkpoints))


def train_here(
    checkpoints: Path,
    jobs: Sequence[Path],
    budget: int | None = None,
    runs: int | None = None,
    worker: Path | None = None,
    heard: list[Event] | None = None,
) -> tuple[int, Events]:
    """Exit code, events by run; `heard` gets the events as they come."""
    log = Heard()
    log.events = [] if heard is None else heard
    options = {"token_budget": budget, "max_runs": runs, "worker": worker}
    code = make_training(jobs, log, checkpoints, **options).run()
    return code, by_run(log.events)


def run_here(job: Path) -> list[Event]:
    """Run one job in this process, which has imported all that trainers do; its events."""
    log = Heard()
    options = argparse.Namespace(
        **{"checkpoints": None, "jobs": [str(job)], "token_budget": None, "max_runs": None},
        **{"checkpoint_s": 60.0, "worker": None, "join": False},
    )
    with _open_folder(options) as folder:
        Training(options, cast(EventLog, log), folder).run()
    return log.events


def by_run(events: Sequence[Event]) -> Events:
    found: Events = defaultdict(list)
    for event in events:
        found[Path(event.pop("run")).parent.name].append(event)
    return found


def adapter_of(job: Path) -> dict[str, torch.Tensor]:
    return load_file(job.parent / "adapter" / "adapter_model.safetensors")


def request_of(path: Path, base: Path) -> RunRequest:
    """What the engine is asked for by a job, whose adapter may be there already."""
    other = path.with_name("again.json")
    fields = json.loads(path.read_text()) | {"output_dir": str(path.parent / "another")}
    other.write_text(json.dumps(fields))
    return prepare(NamedJob("again", TrainJob.read(other)), TextCodec(base)).request


def token_rows(rows: RunRows) -> list[tuple[list[int], list[bool]]]:
    """Each row's tokens, and which of them have a loss."""
    ends = zip(rows.starts, rows.starts[1:], strict=False)
    return [(rows.token_ids[a:b].tolist(), rows.is_answer[a:b].tolist()) for a, b in ends]
