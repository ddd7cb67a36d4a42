"""The example and the benchmarks of the CPU run, on the tiny model or none."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_example_answers_for_every_adapter(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["many_adapters.py", "--base", str(tiny_model)])
    runpy.run_path(str(ROOT / "examples" / "many_adapters.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for name in ("base: ", "tenant-a: ", "tenant-b: ", "'tenant-a': 0.5", "as JSON: {"):
        assert name in printed


def test_the_comparison_measures_every_case(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from bench.cpu import BATCH, RATIOS, run_cases, summarise

    result = summarise(run_cases(tiny_model, tmp_path, num_tokens=3, repeats=1))
    assert [(c["system"], c["batch"], c["adapters"]) for c in result["cases"]] == [
        ("ours", 1, 0),
        ("hf", 1, 0),
        ("ours", BATCH, 0),
        ("hf", BATCH, 0),
        ("ours", BATCH, BATCH),
        ("peft", BATCH, BATCH),
    ]
    assert all(case["tok_s"] > 0 for case in result["cases"])
    assert len(result["ratios"]) == len(RATIOS)


def test_the_scheduler_is_measured_at_every_size() -> None:
    from bench.scheduler import run

    result = run(sizes=(2, 4), num_steps=20, num_adapters=50, size=4)
    cases = [(case["case"], case["running"]) for case in result["cases"]]
    assert cases == [("steady", 2), ("turnover", 2), ("steady", 4), ("turnover", 4)]
    assert all(0 < case["schedule_ms"] < case["step_ms"] for case in result["cases"])
    bars = {bar["bar"]: bar for bar in result["bars"]}
    assert bars["bytes per registered adapter"]["passed"]
    assert bars["steady: growth from 2 to 4"]["at_most"] == pytest.approx(2.2)


def test_a_missed_bar_is_seen() -> None:
    from bench.scheduler import judge

    case = {"case": "steady", "running": 256, "step_ms": 1.6}
    registry = {"bytes_each": 5000, "step_ms_before": 1.0, "step_ms_after": 1.2}
    assert [bar["passed"] for bar in judge([case], registry)] == [False, False, False]
