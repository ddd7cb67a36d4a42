"""The gate on real retrains of a small base by `bench.gate`; bench/results has a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import gate as program
from controlplane.evaluations.decision import Verdict
from controlplane.evaluations.models import Result
from tests import gate_rows

MESSAGES = gate_rows.messages(0)
HELD_OUT, KNOWN = MESSAGES[:100], MESSAGES[100:500]


def answers(rows: list[gate_rows.Row]) -> list[str]:
    return [row["messages"][1]["content"] for row in rows]


def test_each_kind_of_retrain_is_spoiled_where_it_says() -> None:
    good = answers(gate_rows.rows(KNOWN, HELD_OUT, "good", 0))
    right = [
        answer == gate_rows.right_answer(each) for answer, each in zip(good, KNOWN, strict=True)
    ]
    assert 0.9 < sum(right) / len(right) < 1.0  # people are tired now and then
    shares = {}
    for kind in gate_rows.BAD:
        told = answers(gate_rows.rows(KNOWN, HELD_OUT, kind, 1))
        differ = [number for number in range(len(KNOWN)) if told[number] != good[number]]
        shares[kind] = len(differ) / len(KNOWN)
        if kind == "slice":
            assert {KNOWN[number].channel for number in differ} == {gate_rows.CHANNELS[1]}
        if kind == "stale":
            assert all(number % 2 == 0 for number in differ)
        assert len(told) - len(KNOWN) == (8 if kind == "leaked" else 0)
    assert shares["shuffled"] > 0.9 and shares["leaked"] > 0.9
    assert 0.2 < shares["slice"] < 0.3 and 0.1 < shares["stale"] < 0.3


def results(cases: int, *, is_right: bool) -> list[Result]:
    made = []
    for number, message in enumerate(HELD_OUT[:cases]):
        case = program._case(number, message)
        text = case.expected if is_right else "sales now nothing"
        made.append(program._result(case, text, [-0.1, -0.2]))
    return made


def test_cases_among_the_rows_are_found() -> None:
    both = results(100, is_right=True), results(100, is_right=True)
    clean = program.decided(*both, gate_rows.rows(KNOWN, HELD_OUT, "good", 0))
    assert (clean.verdict, clean.num_leaked) == (Verdict.PROMOTE, 0)
    leaked = program.decided(*both, gate_rows.rows(KNOWN, HELD_OUT, "leaked", 0))
    assert (leaked.verdict, leaked.num_leaked) == (Verdict.HOLD, 100)


def test_errors_of_either_kind_fail_the_run() -> None:
    live, rows = results(100, is_right=True), gate_rows.rows(KNOWN, HELD_OUT, "good", 0)
    passed = program.decided(live, live, rows)
    failed = program.decided(live, results(100, is_right=False), rows)
    assert (passed.verdict, failed.verdict) == (Verdict.PROMOTE, Verdict.REJECT)
    as_it_should = {kind: (kind, passed if kind == "good" else failed) for kind in gate_rows.KINDS}
    assert program.passes(program.summary(as_it_should))
    assert not program.passes(program.summary(as_it_should | {"stale": ("stale", passed)}))
    assert not program.passes(program.summary(as_it_should | {"good": ("good", failed)}))


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_gate_decides_on_real_retrains(tmp_path: Path) -> None:
    found = program.retrains(tmp_path, runs=2, threads=1)
    assert found["live_score"] > 0.9
    assert program.passes(found), found["each"]
    for decision in found["each"].values():
        assert decision["verdict"] == "hold" or decision["score"][3] > 0
