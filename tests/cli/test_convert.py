"""`lorikeet datasets convert`: rows of other formats become JSONL, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

from contract.training.chat_rows import lint
from tests.cli.runner import ROOT, Cli

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
ALPACA = {"instruction": "Hi", "output": "Hello"}


def write(folder: Path, *rows: object) -> Path:
    path = folder / "rows.json"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_rows_are_converted_without_an_account(cli: Cli, tmp_path: Path) -> None:
    source, target = write(tmp_path, ALPACA, CHAT, [ALPACA]), tmp_path / "new.jsonl"
    told = cli.json("datasets", "convert", str(source), str(target))
    assert told == {"file": str(target), "num_rows": 3, "converted": {"Alpaca": 2}}
    assert [json.loads(line) for line in target.read_text().splitlines()] == [CHAT] * 3
    assert not lint(target.read_bytes()).problems

    source.write_text(json.dumps([ALPACA, CHAT], indent=2))
    done = cli.run("datasets", "convert", str(source), str(tmp_path / "other.jsonl"))
    assert done.code == 0 and "Alpaca=1 a JSON array=1" in done.out, done


def test_what_would_be_lost_is_named_and_nothing_is_written(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "new.jsonl"
    source = write(tmp_path, ALPACA, ALPACA | {"images": ["x"]}, {"text": "plain"}, "no row")
    done = cli.run("datasets", "convert", str(source), str(target))
    assert done.code == 1 and not target.exists()
    for told in ("line 2: images is not text", "line 3: text does not say", "line 4 has neither"):
        assert told in done.err
    target.write_text("mine")
    done = cli.run("datasets", "convert", str(write(tmp_path, ALPACA)), str(target))
    assert (done.code, target.read_text()) == (1, "mine") and "already exists" in done.err
    done = cli.run("datasets", "convert", str(tmp_path / "missing.json"), str(tmp_path / "x.jsonl"))
    assert done.code == 1 and "No such file" in done.err and not (tmp_path / "x.jsonl").exists()


def test_the_servers_converter_is_the_command_lines() -> None:
    for name in ("row_formats", "strict_json.py"):
        assert (ROOT / "cli" / "lorikeet_cli" / name).resolve() == ROOT / "contract" / name
