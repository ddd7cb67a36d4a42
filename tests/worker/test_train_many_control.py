"""`worker.train --control` as the platform uses it: orders in, checkpoints beside the jobs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.tiny_base import TINY_NAME, write_tiny_base
from tests.trainers import Trainer, start_trainer
from tests.worker.test_train_many import write_jobs
from worker.training.disk import CheckpointFolder


def start(jobs: list[Path]) -> Trainer | subprocess.Popen[str]:
    return start_trainer("worker.train", "--control", "--checkpoints=-", *map(str, jobs))


def test_a_cancelled_run_ends_alone_and_the_end_of_the_orders_saves_the_others(
    tmp_path: Path,
) -> None:
    base = write_tiny_base(tmp_path / TINY_NAME)
    jobs = write_jobs(tmp_path, base, max_steps=20_000)
    one, two, three = (str(jobs[name]) for name in ("one", "two", "three"))
    steps = dict.fromkeys((one, two, three), 0)
    with start(list(jobs.values())) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"cancel": three}) + "\n")  # before it has begun
        process.stdin.flush()
        ended: dict[str, int] = {}
        for line in process.stdout:
            event = json.loads(line)
            run = event["run"]
            if event["event"] == "progress":
                steps[run] = event["step"]
            elif event["event"] == "error":
                assert event["message"] == "it was cancelled"
                ended[run] = steps[two]
            if steps[one] == 5 and steps[two] < 20_000 and one not in ended:
                process.stdin.write(json.dumps({"cancel": one}) + "\n")
                process.stdin.flush()
            if one in ended and steps[two] > ended[one] + 5 and not process.stdin.closed:
                process.stdin.close()
    assert process.returncode == 143
    assert set(ended) == {one, three} and steps[three] == 0 and steps[one] < 20_000
    folder = CheckpointFolder(None)
    saved = folder.load(two)
    assert saved is not None and saved.checkpoint.step >= steps[two] > 5
    assert (jobs["two"].parent / "checkpoint").is_dir()
    assert folder.load(one) is None and folder.load(three) is None


def test_a_paused_run_keeps_its_state_and_goes_on(tmp_path: Path) -> None:
    base = write_tiny_base(tmp_path / TINY_NAME)
    jobs = write_jobs(tmp_path, base, max_steps=20_000)
    one, two, three = (str(jobs[name]) for name in ("one", "two", "three"))
    events: list[dict[str, Any]] = []
    with start(list(jobs.values())) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            events.append(event)
            if (event["run"], event.get("step")) == (one, 5):
                for order in ({"pause": one}, {"cancel": two}, {"cancel": three}):
                    process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
    last = max(e["step"] for e in events if e["run"] == one and e["event"] == "progress")
    [saved] = [event for event in events if event["event"] == "saved"]
    assert (saved["run"], saved["step"]) == (one, last)
    assert [event["run"] for event in events if event["event"] == "error"].count(one) == 1
    with start([jobs["one"]]) as process:
        assert process.stdin is not None and process.stdout is not None
        begun = json.loads(process.stdout.readline())
        process.stdin.close()
        process.stdout.read()
    assert (begun["event"], begun["resumed_step"]) == ("started", last)
