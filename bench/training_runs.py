"""Whole training runs at Llama-3.1-8B's shape: from a process's start to the adapters on the disk.

    python -m bench.training_runs FOLDER --case together [--runs 100] [--share 1.0]
    python -m bench.training_runs FOLDER --case sequence [--runs 64] [--share 1.0] [--alone 2]
    python -m bench.training_runs FOLDER --case present  [--share 0.125]

FOLDER is what `bench.training_files` made. `together` is `python -m worker.train`, all runs;
`sequence` the same, and PEFT's plain loop (`bench.training_peft`) one process a run: `--alone` of
them are measured, the rest is stated by multiplication. `present` is `python -m worker.train` on
one run. `--share` is of each run's 64k tokens: a shorter measurement, whose case also states the
whole, `all_64k_s`: the time before the first step, and the steps at the rate that was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.device import write_whole
from bench.machine import commit
from bench.training_files import LENGTH

RESULTS = Path(__file__).parent / "results" / "training-h200.json"
TOKENS = 65_536
BATCH = 8
Event = dict[str, Any]


class Runs:
    """The jobs of one measurement, below FOLDER/work."""

    def __init__(self, folder: Path, num: int, share: float) -> None:
        self.base, self.num, self.share = folder / "base", num, share
        self.rows = max(BATCH, round(share * TOKENS / LENGTH))
        self.work = folder / f"work-{os.getpid()}"
        self.work.mkdir()
        self.jobs = [self._job(folder, number) for number in range(num)]

    @property
    def tokens(self) -> int:
        """Of each run."""
        return self.rows * LENGTH

    def dataset(self, number: int) -> Path:
        return self.work / f"dataset-{number}.jsonl"

    def _job(self, folder: Path, number: int) -> Path:
        with (folder / f"dataset-{number}.jsonl").open() as whole:
            self.dataset(number).write_text("".join(itertools.islice(whole, self.rows)))
        path = self.work / f"job-{number}.json"
        fields = {
            "base_model_dir": str(self.base),
            "dataset": str(self.dataset(number)),
            "output_dir": str(self.work / f"adapter-{number}"),
            "hyperparameters": {"seed": number, "batch_size": BATCH, "max_length": LENGTH},
        }
        path.write_text(json.dumps(fields))
        return path


def events_of(module: str, *arguments: str) -> Iterator[tuple[float, Event]]:
    """Run `python -m module`; yield its events, each with the seconds since its process began."""
    began = time.perf_counter()
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            yield time.perf_counter() - began, json.loads(line)
    if child.returncode != 0:
        sys.exit(f"{module} ended with {child.returncode}")
    yield time.perf_counter() - began, {"event": "ended"}


def run_together(runs: Runs, options: argparse.Namespace) -> Event:
    """Train all runs by `worker.train`; what took how long."""
    first: dict[str, float] = {}
    tokens: dict[str, float] = {}
    kinds: Counter[str] = Counter()
    marks: list[tuple[float, int]] = []
    given = [f"--checkpoints={runs.work / 'checkpoints'}", *map(str, runs.jobs), "--checkpoint-s"]
    step_tokens = min(BATCH, runs.rows) * LENGTH
    for second, event in events_of("worker.train", *given, str(options.checkpoint_s)):
        kind = event["event"]
        kinds[kind] += 1
        first.setdefault(kind, second)
        if kind in ("error", "later"):
            print(json.dumps(event), file=sys.stderr, flush=True)
        if kind == "done":
            shutil.rmtree(event["output"])  # 168 MB each
        if kind == "progress":
            run = event["run"]
            tokens[run] = tokens.get(run, 0) + step_tokens
            marks.append((second, step_tokens))
        last = second
    total = runs.num * runs.tokens
    assert kinds["done"] == runs.num and sum(tokens.values()) == total, (kinds, tokens)
    # Without the steps of the first quarter, in which runs begin, and of the last one.
    quarter = len(marks) // 4
    steady = marks[quarter : 3 * quarter + 1]
    rate = sum(each for _, each in steady[1:]) / (steady[-1][0] - steady[0][0])
    whole_rate = total / (marks[-1][0] - first["progress"])
    before, after = first["progress"], last - marks[-1][0]
    case = {
        "case": f"{runs.num} runs x {runs.tokens // 1024}k tokens, worker.train",
        "runs": runs.num,
        "tokens": total,
        "tok_s": round(total / last),
        "steady_tok_s": round(rate),
        "seconds": round(last, 1),
        "first_started_s": round(first["started"], 1),
        "first_step_s": round(before, 1),
        "last_step_s": round(marks[-1][0], 1),
        "ended_s": round(last, 1),
        "ten_rates": ten_rates(marks),
    }
    if runs.share < 1:
        case["all_64k_s"] = round(before + runs.num * TOKENS / whole_rate + after)
    return case


def ten_rates(marks: list[tuple[float, int]]) -> list[int]:
    """Tokens a second in each tenth of the time."""
    start, end = marks[0][0], marks[-1][0]
    width = (end - start) / 10 or 1.0
    sums = [0] * 10
    for second, tokens in marks[1:]:
        sums[min(9, int((second - start) / width))] += tokens
    return [round(each / width) for each in sums]


def run_peft(runs: Runs, number: int) -> Event:
    """One run by PEFT's plain loop, in a process of its own."""
    done: Event = {}
    adapter = str(runs.work / f"peft-{number}")
    for second, event in events_of(
        "bench.training_peft", str(runs.base), str(runs.dataset(number)), adapter
    ):
        if event["event"] == "done":
            done = event
        last = second
    return {**done, "seconds": last}


def run_sequence(runs: Runs, options: argparse.Namespace) -> Event:
    """All runs together, against PEFT's loop one run after the other."""
    alone = [run_peft(runs, number) for number in range(options.alone)]
    print(json.dumps(alone), flush=True)
    # The first reads the base for the first time, if nothing did.
    each = min(one["seconds"] for one in alone)
    together = run_together(runs, options)
    return {
        **together,
        "case": f"{runs.num} runs x {runs.tokens // 1024}k tokens in sequence",
        "peft_runs": alone,
        "peft_run_s": round(each, 1),
        "peft_all_s": round(each * runs.num),
        "peft_stated_by": f"{runs.num} x the fastest of {options.alone} whole runs",
        "times": round(each * runs.num / together["seconds"], 2),
    }


def run_present(runs: Runs, options: argparse.Namespace) -> Event:
    """One run by the present trainer."""
    seen = [(second, event) for second, event in events_of("worker.train", str(runs.jobs[0]))]
    steps = [second for second, event in seen if event["event"] == "progress"]
    return {
        "case": f"1 run x {runs.tokens // 1024}k tokens, worker.train",
        "runs": 1,
        "tokens": runs.tokens,
        "tok_s": round(runs.tokens / seen[-1][0]),
        "first_step_s": round(steps[0], 1),
        "step_s": round((steps[-1] - steps[0]) / max(1, len(steps) - 1), 3),
        "seconds": round(seen[-1][0], 1),
    }


CASES = {"together": run_together, "sequence": run_sequence, "present": run_present}


def add_case(path: Path, case: Event) -> None:
    """Put a case into a report, in the place of one of that name."""
    report = json.loads(path.read_text()) if path.exists() else {"cases": []}
    cases = [each for each in report["cases"] if each["case"] != case["case"]]
    report["cases"] = [*cases, {**case, "commit": commit()}]
    write_whole(path, report)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--alone", type=int, default=2)
    parser.add_argument("--checkpoint-s", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    num = options.runs or {"together": 100, "sequence": 64, "present": 1}[options.case]
    runs = Runs(options.folder, num, options.share)
    try:
        case = CASES[options.case](runs, options)
    finally:
        shutil.rmtree(runs.work)
    print(json.dumps(case), flush=True)
    add_case(options.out, case)


if __name__ == "__main__":
    main()
