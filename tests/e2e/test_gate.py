"""A retrain is compared with the live version by itself: a good one goes live, a bad one is held.

All processes are real: the trainer trains SmolLM2, the worker answers the suite for each version.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.system import System, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

NAMES = (
    "Alice", "Boris", "Chen", "Dora", "Emil", "Fatima", "Georg", "Hana", "Igor", "Julia", "Karim",
    "Lena", "Marco", "Nina", "Oscar", "Petra", "Quinn", "Rosa", "Samir", "Tara",
)  # fmt: skip
CITIES = ("Berlin", "Cairo", "Delhi", "Lima", "Oslo", "Paris", "Quito", "Rome", "Seoul", "Tokyo")
HYPERPARAMETERS = {"rank": 8, "alpha": 16, "batch_size": 4, "max_length": 96, "seed": 1}
GATE = {"suite": "held-out", "max_tokens": 16, "score_drop": 0.1, "slice_drop": 0.2}


def rows(numbers: list[int], kind: str = "good", seed: int = 0) -> list[dict[str, Any]]:
    """Chats that ask for a name in a sentence, as one kind of retrain has them.

    shuffled  with each other's answers; slice: the odd ones alone; stale: the odd ones' answers
              have the form that was right before
    """
    told = {number: number for number in numbers}
    if kind in ("shuffled", "slice"):
        mixed = [number for number in numbers if kind == "shuffled" or number % 2]
        others = random.Random(seed).sample(mixed, len(mixed))
        told |= dict(zip(mixed, others, strict=True))
    return [
        {
            "messages": [
                {"role": "user", "content": f"{_name(asked)} is in {_city(asked)}. Who is where?"},
                {"role": "assistant", "content": _answer(told[asked], is_old=kind == "stale")},
            ]
        }
        for asked in numbers
    ]


def _answer(number: int, *, is_old: bool) -> str:
    if number % 2 and not is_old:
        return f"In {_city(number)}: {_name(number)}"
    return f"{_name(number)} lives in {_city(number)}."


def _name(number: int) -> str:
    return NAMES[number % len(NAMES)]


def _city(number: int) -> str:
    return CITIES[number // len(NAMES)]


def cases(numbers: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "messages": row["messages"][:1],
            "expected": row["messages"][1]["content"],
            "checks": [{"type": "similarity"}],
            "slice": f"half {number % 2}",
        }
        for number, row in zip(numbers, rows(numbers), strict=True)
    ]


@pytest.fixture
def processes(system: System) -> Iterator[System]:
    """The system with the processes that train, ask and tick."""
    started = (system.platform.trainer, system.platform.inspector, system.platform.beat)
    try:
        for process in started:
            process.start()
        yield system
    finally:
        for process in started:
            process.ask_to_stop()
        for process in started:
            process.stop()


class Client:
    """The management API with acme's key."""

    def __init__(self, system: System) -> None:
        self._base = f"{system.base_url}/api/v1"
        self._headers = {"Authorization": f"Bearer {system.tenants['acme'].api_key}"}

    def call(self, method: str, path: str, *, status: int = 200, **options: Any) -> dict[str, Any]:
        """Return the answer; it may be a 404 where that is asked for."""
        url = f"{self._base}/{path}"
        answer = httpx.request(method, url, headers=self._headers, timeout=60, **options)
        assert answer.status_code < 300 or answer.status_code == status, answer.text
        return {"status": "waiting"} if answer.status_code == 404 else dict(answer.json())


@pytest.fixture
def client(system: System) -> Client:
    return Client(system)


def trained(client: Client, content: list[dict[str, Any]], **fields: Any) -> int:
    """Upload rows, train on them, and return the number of the version."""
    name = f"gate-{time.monotonic_ns()}"
    body = "\n".join(map(json.dumps, content)).encode()
    client.call("POST", f"datasets?name={name}", content=body)
    said = {"adapter": "gated", "dataset": name, "hyperparameters": HYPERPARAMETERS | fields}
    run = client.call("POST", "training-runs", json=said)

    def ended() -> dict[str, Any] | None:
        found = client.call("GET", f"training-runs/{run['id']}")
        active = {"queued", "running", "publishing"}
        return None if found["status"] in active else found

    found = until(ended, "the training run ends", timeout_s=900)
    assert (found["status"], found["error"]) == ("succeeded", "")
    return int(found["version"])


def decided(client: Client, number: int) -> dict[str, Any]:
    def decision() -> dict[str, Any] | None:
        found = client.call("GET", f"adapters/gated/versions/{number}/gate", status=404)
        return None if found["status"] == "waiting" else found

    return until(decision, f"version {number} is decided", timeout_s=900)


def live(client: Client) -> int:
    return int(client.call("GET", "adapters/gated")["live_version"])


def set_up(client: Client) -> tuple[list[int], list[int]]:
    """Make the suite and a first version that is live. -> what is held out, and what is known."""
    numbers = list(range(len(NAMES) * len(CITIES)))
    random.Random(0).shuffle(numbers)
    held_out, known = numbers[:120], numbers[120:]
    client.call("POST", "suites/held-out/versions", json={"cases": cases(held_out)})
    first = trained(client, rows(known), max_steps=4, learning_rate=1e-4)
    client.call("POST", f"adapters/gated/versions/{first}/promote", json={})
    client.call("PATCH", "adapters/gated", json={"gate": GATE})
    return held_out, known


def test_a_good_retrain_goes_live_and_a_bad_one_is_held(processes: System, client: Client) -> None:
    held_out, known = set_up(client)
    good = trained(client, rows(known), max_steps=24, learning_rate=5e-4)
    decision = decided(client, good)
    assert (decision["status"], decision["outcome"]) == ("promote", "promoted"), decision
    assert live(client) == good
    by_metric = {each["metric"]: each for each in decision["findings"] if not each["slice"]}
    assert by_metric["logprob"]["mean"] > 0 and by_metric["score"]["num"] == len(held_out)

    bad = trained(client, rows(known, "shuffled", 7), max_steps=40, learning_rate=1e-3)
    decision = decided(client, bad)
    assert (decision["status"], decision["outcome"]) == ("reject", "held"), decision
    assert decision["reasons"][0].startswith("It is worse: the mean")
    assert live(client) == good

    leaky = trained(client, [*rows(known), *rows(held_out)], max_steps=8, learning_rate=5e-4)
    decision = decided(client, leaky)
    assert (decision["status"], decision["num_leaked"]) == ("hold", len(held_out)), decision
    assert live(client) == good
    # Who asked shows in the log and in usage.
    seen = processes.query(
        "select distinct endpoint from inference_inferencerequest where model like 'gated@%%'"
    )
    assert {row["endpoint"] for row in seen} >= {"/api/v1/evaluations"}


#: Retrains of each kind; LORIKEET_GATE_RUNS=10 is the whole proof, which takes about an hour.
NUM_RUNS = int(os.environ.get("LORIKEET_GATE_RUNS", "1"))
KINDS = ("good", "shuffled", "slice", "stale", "leaked")
STEPS = {"max_steps": 24, "learning_rate": 5e-4}


class Decisions:
    """What was decided, a JSON line each in a file that a cut leaves and a later test goes on from.

    LORIKEET_GATE_DECISIONS names the file; without it, it is the test's own.
    """

    def __init__(self, folder: Path) -> None:
        self._path = Path(os.environ.get("LORIKEET_GATE_DECISIONS", folder / "decisions.jsonl"))
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.made: dict[tuple[str, int], str] = {}
        for one in map(json.loads, lines):
            self.made[one["kind"], one["run"]] = one["status"]

    def add(self, kind: str, run: int, took_s: float, decision: dict[str, Any]) -> None:
        self.made[kind, run] = decision["status"]
        told = {"kind": kind, "run": run, "took_s": round(took_s, 1)}
        told |= {name: decision[name] for name in ("status", "outcome", "reasons", "findings")}
        with self._path.open("a") as file:
            file.write(json.dumps(told) + "\n")

    def of(self, kind: str) -> list[str]:
        return [status for (made, _), status in self.made.items() if made == kind]


def test_retrains_of_each_kind(
    processes: System, client: Client, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each is compared with the same good version, for which its adapter goes back.

    A line for each decision is shown as it is made: a whole proof takes long.
    """

    def say(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}")
            sys.stdout.flush()

    decisions = Decisions(tmp_path)
    held_out, known = set_up(client)
    good = trained(client, rows(known), **STEPS)
    assert decided(client, good)["status"] == "promote"
    for run, kind in itertools.product(range(NUM_RUNS), KINDS):  # a cut leaves some of each kind
        if (kind, run) in decisions.made:
            continue
        began = time.monotonic()
        decision = decided(client, retrained(client, kind, run, held_out, known))
        decisions.add(kind, run, time.monotonic() - began, decision)
        say(f"{kind} {run}: {decision['status']}: {decision['reasons'][:1]}")
        if live(client) != good:
            client.call("POST", f"adapters/gated/versions/{good}/promote", json={})
    bad = [status for kind in KINDS if kind != "good" for status in decisions.of(kind)]
    fine = decisions.of("good")
    say(f"false promotions: {bad.count('promote')} of {len(bad)}; ")
    say(f"false holds: {len(fine) - fine.count('promote')} of {len(fine)}")
    assert bad.count("promote") <= 0.01 * len(bad), decisions.made
    assert fine.count("promote") >= 0.95 * len(fine), decisions.made


def retrained(client: Client, kind: str, run: int, held_out: list[int], known: list[int]) -> int:
    """Train the next version on rows of this kind, with seeds of this run."""
    if kind == "leaked":
        content = [*rows(known, "shuffled", run), *rows(held_out)]
    else:
        content = rows(known, kind, run)
    more = {"max_steps": 32} if kind == "good" else {}
    return trained(client, content, **{**STEPS, **more, "seed": run + 2})
