"""The benchmarks of the CPU run, on the tiny model or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_comparison_measures_every_case(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from bench.cpu import BATCH, RATIOS, run_cases, summarise

    result = summarise(run_cases(tiny_model, tmp_path, num_tokens=3, repeats=1))
    assert [(c["system"], c["batch"], c["adapters"]) for c in result["cases"]] == [
        ("ours", 1, 0),
        ("hf", 1, 0),
        ("hf", BATCH, 0),
        ("ours", BATCH, 0),
        ("ours", BATCH, BATCH),
        ("peft", BATCH, BATCH),
    ]
    assert all(case["tok_s"] > 0 for case in result["cases"])
    assert len(result["ratios"]) == len(RATIOS)


def test_a_ratio_is_the_median_of_the_rounds_own() -> None:
    pytest.importorskip("peft")
    from bench.cpu import RATIOS, summarise

    names = {name for case, other, _ in RATIOS for name in (case, other)}
    speeds = {name: [100.0, 50.0, 10.0] for name in names}  # a machine that slows down
    speeds["ours 16 adapters"] = [84.0, 45.0, 9.0]
    own = summarise(speeds)["ratios"][2]
    assert (own["case"], own["compared_with"]) == ("ours 16 adapters", "ours 16 base")
    assert (own["rounds"], own["ratio"], own["passed"]) == ([0.84, 0.9, 0.9], 0.9, True)


def test_the_scheduler_is_measured_at_every_size() -> None:
    from bench.scheduler import KINDS, run

    result = run(sizes=(2, 4), num_steps=20, num_adapters=50, size=4)
    cases = [(case["case"], case["running"]) for case in result["cases"]]
    assert cases == [(kind, size) for kind in KINDS for size in (2, 4)]
    assert all(0 < case["schedule_ms"] < case["step_ms"] for case in result["cases"])
    bars = {bar["bar"]: bar for bar in result["bars"]}
    assert bars["bytes per registered adapter"]["passed"]
    assert bars["steady: growth from 2 to 4"]["at_most"] == pytest.approx(2.2)


def test_a_missed_bar_is_seen() -> None:
    from bench.scheduler import judge

    case = {"case": "steady", "running": 256, "step_ms": 1.6}
    registry = {"bytes_each": 5000, "step_ms_before": 1.0, "step_ms_after": 1.2}
    assert [bar["passed"] for bar in judge([case], registry)] == [False, False, False]


def test_the_trace_is_s_loras() -> None:
    from bench.workload import slora_trace

    trace = slora_trace(20_000, rate=50.0, adapters=2000)
    assert trace[-1].at == pytest.approx(400, rel=0.05)
    assert {min(a.prompt for a in trace), min(a.new for a in trace)} == {8}
    assert {max(a.prompt for a in trace), max(a.new for a in trace)} == {512}
    first, second = (sum(a.adapter == i for a in trace) for i in (0, 1))
    assert first / second == pytest.approx(2, rel=0.15)
    assert max(a.adapter for a in trace) < 2000
    few = slora_trace(20_000, rate=50.0, adapters=5)
    assert [(a.at, a.prompt, a.new) for a in few] == [(a.at, a.prompt, a.new) for a in trace]


def test_many_adapters_are_measured() -> None:
    from bench.many import parse, run

    options = (
        "--shape tiny --device cpu --seconds 0.6 --latency-seconds 0.6 --rate 40 --latency-rate 40 "
        "--registered 30 --max-running 8 --longest 16 --fitting 3 --files 2 --arena-gb 0.004 "
        "--kv-gb 0.0005"
    )
    result = run(parse(options.split()))
    cases = {case["case"]: case for case in result["results"]}
    assert list(cases) == ["none", "few", "many", "resident", "cold", "overcommitted"]
    assert cases["none"]["base_ratio"] == 1.0
    assert all(case["tok_s"] > 0 and case["ttft_p99_ms"] > 0 for case in cases.values())
    assert cases["many"]["resident"] > 5
    assert cases["resident"]["adapters"] == 3 <= cases["resident"]["resident"]
    # Registered are 16 times what the arena could hold, so some were evicted or never loaded.
    over = cases["overcommitted"]
    assert 0 < over["resident"] <= over["adapters"] // 16
    assert [bar["bar"].split(":")[0] for bar in result["bars"]] == ["tok_s", "tok_s", "ttft_p99_ms"]


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_the_gpu_table_runs_at_a_tiny_size(shape: str) -> None:
    from bench.engine import Bench, Case, run_cases

    bench = Bench(shape, "cpu", arena_bytes=16 << 20, max_running=4)
    cases = [Case(kind="decode", batch=4, adapters=n) for n in (0, 2)]
    host = {"gpu": "none", "copy_tb_s": 0.01, "matmul_tflop_s": 0.01, "torch": "", "triton": ""}
    host["commit"] = "0"
    results = run_cases(bench, cases, host, rounds=1)
    bench.close()
    keys = "kind batch adapters rank ms_step base_ratio floor_ms gpu copy_tb_s torch triton commit"
    assert all(set(keys.split()) <= row.keys() for row in results)
    assert [row["adapters"] for row in results] == [0, 2]


def test_a_result_has_a_line_for_each_row(tmp_path: Path) -> None:
    from bench.machine import write_result

    report = {"cpus": 2, "cases": [{"case": "a"}, {"case": "b"}], "empty": [], "part": {"p50": 1}}
    path = tmp_path / "result.json"
    write_result(path, report)
    assert json.loads(path.read_text()) == report
    lines = [line.strip().rstrip(",") for line in path.read_text().splitlines()]
    assert lines[2:5] == ['"cases": [', '{"case": "a"}', '{"case": "b"}']
    assert '"part": {"p50": 1}' in lines


def test_a_profile_names_what_took_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    from bench.engine import Bench, Case

    bench = Bench("tiny", "cpu", arena_bytes=16 << 20, max_running=2)
    bench.profile(Case(kind="decode", batch=2, adapters=1), num_steps=2)
    bench.close()
    title, *lines = capsys.readouterr().out.splitlines()
    assert "ms on the device, a prefill and 2 decodes" in title
    assert len(lines) > 5 and any("mm" in line for line in lines)
    shares = [float(line.partition("%")[0]) for line in lines]
    assert shares == sorted(shares, reverse=True) and 50 < sum(shares) < 101


def test_a_machine_without_a_gpu_says_what_runs_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.device import provenance
    from bench.engine import parse

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu"):
        provenance()
    assert {"gpu", "torch", "triton", "commit"} == provenance("cpu").keys()
    monkeypatch.setattr("sys.argv", ["engine", "--device", "cpu", "--shape", "tiny"])
    assert parse().arena_gb == 0  # not the 34 GB of a GPU's


def test_the_documents_figures_are_those_of_the_result_files() -> None:
    from bench.tables import DOCUMENTS, ROOT, fill, load

    figures = load()
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        assert "<!-- bench.tables: " in text
        assert fill(text, figures) == text, f"{name}: run python -m bench.tables"
