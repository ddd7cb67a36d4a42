"""The example and the CPU comparison run, on the tiny model."""

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
