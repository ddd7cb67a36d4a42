"""The gate's errors: false promotions and false holds, on planted retrains.

    python -m bench.gate [--runs 10] [--decisions 500] [--threads 1] [--folder FOLDER] [--out FILE]

`retrains` are real: a small base, one live version and `--runs` retrains of each kind are trained
by one `worker.train`; each answers the suite's cases in the serving engine, which gives the
log-probabilities of the expected answers, too; the evaluation's own checks score them, its own
search finds leaked cases, and the gate decides by its defaults. `synthetic` are decisions on drawn
scores (tests/controlplane/evaluations/planted.py). Prints a table, writes
bench/results/gate-cpu.json, and exits with 1 if more than 1 % of the bad retrains are promoted,
or more than 5 % of the good ones are not. With a FOLDER, an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from bench.machine import environment, write_result  # noqa: E402
from contract.training import chat_rows  # noqa: E402
from controlplane.evaluations import checks, leakage  # noqa: E402
from controlplane.evaluations.asking import turn_end  # noqa: E402
from controlplane.evaluations.comparison import Changed, pair_of  # noqa: E402
from controlplane.evaluations.decision import (  # noqa: E402
    Decision,
    Metric,
    Policy,
    Verdict,
    decide,
)
from controlplane.evaluations.models import Case, Result  # noqa: E402
from engine.dash.config import DashConfig  # noqa: E402
from engine.dash.engine import DashEngine  # noqa: E402
from engine.request import SamplingParams  # noqa: E402
from engine.text.codec import TextCodec  # noqa: E402
from tests import gate_rows  # noqa: E402
from tests.controlplane.evaluations.planted import decisions_of  # noqa: E402
from tests.gate_rows import BAD, KINDS, Message, Row, write_base  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "gate-cpu.json"
NUM_CASES = 400
#: Rows of the live version, and those that came since.
NUM_ROWS, NUM_NEW = 1500, 150
HYPERPARAMETERS = {"rank": 16, "epochs": 3, "batch_size": 32, "learning_rate": 0.01}
MAX_TOKENS = 8
CHECKS = ({"type": "exact"}, {"type": "similarity"})
MOST_PROMOTED, MOST_HELD = 0.01, 0.05


class Retrains:
    """The live version and the retrains of each kind, below one folder."""

    def __init__(self, folder: Path, runs: int, threads: int) -> None:
        self._folder, self._threads = folder, threads
        found = iter(gate_rows.messages(seed=0))
        self.held_out = _take(found, NUM_CASES)
        known = _take(found, NUM_ROWS)
        self.rows: dict[str, list[Row]] = {"live": gate_rows.rows(known, [], "good", 0)}
        for run in range(runs):
            more = [*known, *_take(found, NUM_NEW)]
            for kind in KINDS:
                self.rows[f"{kind}-{run}"] = gate_rows.rows(more, self.held_out, kind, run)
        self.base = folder / "base"
        if not (self.base / "lorikeet.json").exists():  # which is written last
            write_base(self.base, list(map(gate_rows.other_desk, found)))

    def adapter(self, name: str) -> Path:
        return self._folder / name

    def train(self) -> None:
        """Train all of them in one batch; a folder's adapters are not trained again."""
        jobs = [
            self._job(number, name)
            for number, name in enumerate(self.rows)
            if not self.adapter(name).exists()
        ]
        if not jobs:
            return
        command = [sys.executable, "-m", "worker.train"]
        command.append(f"--checkpoints={self._folder / 'checkpoints'}")
        with subprocess.Popen([*command, *jobs], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for event in map(json.loads, child.stdout):
                if event["event"] in ("error", "later"):
                    print(event, file=sys.stderr)
        if child.returncode != 0:
            raise RuntimeError(f"worker.train ended with {child.returncode}")

    def _job(self, number: int, name: str) -> str:
        dataset, path = self._folder / f"{name}.jsonl", self._folder / f"{name}.json"
        dataset.write_text("".join(json.dumps(row) + "\n" for row in self.rows[name]))
        fields = {
            "base_model_dir": str(self.base),
            "dataset": str(dataset),
            "output_dir": str(self.adapter(name)),
            "hyperparameters": {**HYPERPARAMETERS, "seed": number},
            "num_threads": self._threads,
        }
        path.write_text(json.dumps(fields))
        return str(path)


def _take(found: Iterator[Message], number: int) -> list[Message]:
    return [next(found) for _ in range(number)]


class Suite:
    """The cases, and the engine that answers them."""

    def __init__(self, held_out: Sequence[Message], base: Path, threads: int) -> None:
        self._codec = TextCodec(base)
        self.cases = [_case(number, message) for number, message in enumerate(held_out)]
        self._prompts = [self._tokens(case.messages, has_more=True) for case in self.cases]
        self._wholes = [
            self._tokens([*case.messages, _assistant(case.expected)], has_more=False)
            for case in self.cases
        ]
        self._engine = DashEngine(base, DashConfig(num_threads=threads, max_context=64))

    def _tokens(self, messages: Any, *, has_more: bool) -> list[int]:
        return self._codec.encode_chat(self._codec.render(messages, generation_prompt=has_more))

    def results(self, name: str, adapter: Path) -> list[Result]:
        """Return what a version makes of each case, as an evaluation stores it."""
        self._engine.register_adapter(name, adapter)
        try:
            answers = self._engine.generate(
                self._prompts, name, max_new_tokens=MAX_TOKENS, progress=False
            )
            scored = self._engine.generate(
                self._wholes,
                name,
                max_new_tokens=1,
                sampling=SamplingParams(temperature=0.0, prompt_logprobs=0),
                progress=False,
            )
        finally:
            self._engine.unregister_adapter(name)
        found = []
        for case, prompt, answer, score in zip(
            self.cases, self._prompts, answers, scored, strict=True
        ):
            if answer.error or score.error or score.prompt_logprobs is None:
                raise RuntimeError(f"{name} did not answer: {answer.error or score.error}")
            # The first token of a prompt has no log-probability.
            expected = score.prompt_logprobs[len(prompt) - 1 :]
            end = turn_end([self._told(token.token_id) for token in expected])
            found.append(_result(case, answer.text, [token.logprob for token in expected[:end]]))
        return found

    def _told(self, token_id: int) -> dict[str, Any]:
        """Return a token as the worker tells it."""
        piece = self._codec.pieces.of(token_id, is_first=False)
        return {"token": piece.text, "bytes": piece.bytes}

    def close(self) -> None:
        self._engine.close()


def _case(number: int, message: Message) -> Case:
    messages = [{"role": "user", "content": message.text}]
    return Case(
        position=number,
        slice=message.channel,
        messages=messages,
        expected=gate_rows.right_answer(message),
        checks=list(CHECKS),
        prompt_sha256=leakage.prompt_digest(messages),
    )


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _result(case: Case, output: str, logprobs: list[float]) -> Result:
    scores = checks.scores(case.checks, output, case.expected)
    return Result(
        case=case,
        output=output,
        scores=scores,
        score=checks.mean_of(scores),
        logprob=sum(logprobs),
        num_tokens=len(logprobs),
    )


def decided(live: list[Result], new: list[Result], rows: list[Row]) -> Decision:
    """Return the gate's decision on a version that was trained on these rows."""
    lines = (json.dumps(row).encode() for row in rows)
    trained = set(leakage.digests_of_rows(chat_rows.read_rows(lines)))
    pairs = [
        pair_of(
            Changed(case=before.case, before=before, after=after),
            is_leaked=before.case.prompt_sha256 in trained,
        )
        for before, after in zip(live, new, strict=True)
    ]
    return decide(pairs, Policy())


def retrains(folder: Path, runs: int, threads: int) -> dict[str, Any]:
    """Train, ask, decide; return the figures."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        done = work()
        seconds[name] = round(time.perf_counter() - began, 1)
        print(name, seconds[name], "s", file=sys.stderr)
        return done

    made: Retrains = timed("base", lambda: Retrains(folder, runs, threads))
    timed("train", made.train)
    suite = Suite(made.held_out, made.base, threads)
    try:
        answered = timed(
            "answer", lambda: {name: suite.results(name, made.adapter(name)) for name in made.rows}
        )
    finally:
        suite.close()
    live = answered.pop("live")
    decisions = {
        name: decided(live, results, made.rows[name]) for name, results in answered.items()
    }
    return {
        "seconds": seconds,
        "cases": NUM_CASES,
        "rows": NUM_ROWS + NUM_NEW,
        "live_score": round(statistics.mean(result.score or 0.0 for result in live), 3),
        **summary({name: (name.split("-")[0], each) for name, each in decisions.items()}),
        "each": {name: _told(each) for name, each in decisions.items()},
    }


def synthetic(number: int) -> dict[str, Any]:
    """Decide on drawn scores; return the figures."""
    return summary(
        {
            f"{kind}-{seed}": (kind, decide(decisions_of(kind, seed), Policy()))
            for kind in KINDS
            for seed in range(number)
        }
    )


def summary(decisions: dict[str, tuple[str, Decision]]) -> dict[str, Any]:
    """Return how many of each kind went how, and the rates of the two errors."""
    kinds = {}
    for kind in KINDS:
        own = [decision for of, decision in decisions.values() if of == kind]
        verdicts = collections.Counter(decision.verdict.value for decision in own)
        kinds[kind] = {
            "decisions": len(own),
            **{verdict.value: verdicts[verdict.value] for verdict in Verdict},
            "smallest_drop": _smallest(own, Metric.SCORE),
            "smallest_drop_nats": _smallest(own, Metric.LOGPROB),
        }
    bad = sum(kinds[kind]["decisions"] for kind in BAD)
    promoted = sum(kinds[kind]["promote"] for kind in BAD)
    good = kinds["good"]
    held = good["decisions"] - good["promote"]
    return {
        "kinds": kinds,
        "false_promotions": {"number": promoted, "of": bad, "at_most": MOST_PROMOTED},
        "false_holds": {"number": held, "of": good["decisions"], "at_most": MOST_HELD},
    }


def _smallest(decisions: list[Decision], metric: Metric) -> list[float]:
    """Return the least and the greatest of the drops that could have been seen."""
    found = [
        finding.interval.smallest_drop
        for decision in decisions
        for finding in decision.findings
        if finding.metric == metric and not finding.slice
    ]
    return [round(min(found), 3), round(max(found), 3)] if found else []


def _told(decision: Decision) -> dict[str, Any]:
    told: dict[str, Any] = {"verdict": decision.verdict.value, "leaked": decision.num_leaked}
    for finding in decision.findings:
        if not finding.slice:
            found = finding.interval
            told[finding.metric.value] = [
                round(each, 3) for each in (found.mean, found.low, found.high, found.smallest_drop)
            ]
    return told | {"reason": decision.reasons[0]}


def passes(part: dict[str, Any]) -> bool:
    return all(
        part[name]["number"] <= part[name]["at_most"] * part[name]["of"]
        for name in ("false_promotions", "false_holds")
    )


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10, help="retrains of each kind")
    parser.add_argument("--decisions", type=int, default=500, help="drawn ones of each kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keeps what was trained")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    report = environment("bench.gate")
    with contextlib.ExitStack() as stack:
        if args.folder is None:
            made = tempfile.TemporaryDirectory(prefix="bench-gate-")
            folder = Path(stack.enter_context(made))
        else:
            folder = args.folder
            folder.mkdir(exist_ok=True)
        report["retrains"] = retrains(folder, args.runs, args.threads)
    report["synthetic"] = synthetic(args.decisions)
    for part in ("retrains", "synthetic"):
        for kind, figures in report[part]["kinds"].items():
            print(part, kind, figures)
        report[part]["passed"] = passes(report[part])
    write_result(args.out, report)
    return 0 if report["retrains"]["passed"] and report["synthetic"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
