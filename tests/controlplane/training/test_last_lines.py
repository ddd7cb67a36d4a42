"""What the log, and a tenant, get of a trainer's standard error."""

from __future__ import annotations

from pathlib import Path

from controlplane.training.last_lines import MAX_LINES, for_tenant, last_lines

TRACE = """Traceback (most recent call last):
  File "/app/worker/train.py", line 120, in main
    train(TrainJob.read(Path(sys.argv[1])), log)
  File "/usr/local/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
RuntimeError: cannot open /var/lib/lorikeet/train-x1/dataset.jsonl (https://hub.example/a/b)
"""


def test_progress_bars_and_controls_are_cleaned(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    bar = "\r".join(f"\x1b[32m{n:3}%|##|\x1b[0m" for n in range(101))
    log.write_bytes(f"{bar}\n\x07bell\x00\nlk_live_abcdefghijklmnop\n\xff".encode("latin-1"))
    assert last_lines(log) == ["100%|##|", "\\x07bell\\x00", "lk_live_…", "\ufffd"]


def test_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("\n".join(f"line {n} " + "x" * 500 for n in range(5000)) + "\n\n")
    lines = last_lines(log)
    assert len(lines) == MAX_LINES and lines[-1].startswith("line 4999 x")
    assert max(map(len, lines)) == 300
    log.write_text("")
    assert last_lines(log) == []


def test_a_tenant_reads_the_trace_without_folders(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("loading shards from /model\n" + TRACE)
    told = for_tenant("RuntimeError: no /srv/x/y.bin", last_lines(log), max_chars=2000)
    assert told.startswith('RuntimeError: no y.bin\n\n  File "train.py", line 120, in main')
    assert told.splitlines()[-1].startswith("RuntimeError: cannot open dataset.jsonl (https://")
    assert "/app" not in told and "/var" not in told and "site-packages" not in told
    assert "loading shards" not in told


def test_a_long_trace_keeps_its_cause(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    frame = '  File "/a/b.py", line 1, in f\n' * 200
    log.write_text(TRACE.replace("RuntimeError", frame + "RuntimeError"))
    told = for_tenant("m" * 5000, last_lines(log), max_chars=2000)
    assert len(told) <= 2000
    assert told.startswith("m" * 1000 + "\n\n") and "RuntimeError: cannot open" in told
    assert for_tenant("why", [], max_chars=2000) == "why"
    assert for_tenant("why", ["no trace"], max_chars=2000) == "why"
