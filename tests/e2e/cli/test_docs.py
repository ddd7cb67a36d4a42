"""The examples of docs/cli.md do what they say: each block runs, in the order of the page.

They share a home and a folder, in which are an adapter `invoices`, `chats.jsonl`, `more.jsonl`.
$SERVER, $API_KEY and $OPERATOR_KEY are what a reader has. A block after `<!-- not run: why -->` is
left out; blocks after `<!-- operator -->` need the operators' API by key.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lorikeet_cli.app import app

from demo.seed import last_json, manage
from tests.cli.runner import ROOT, Cli
from tests.e2e.adapters import lora_tensors, write_adapter
from tests.e2e.cli.conftest import Files
from tests.e2e.system import System

PAGE = ROOT / "docs" / "cli.md"
_BLOCK = re.compile(r"^(<!-- not run:[^\n]* -->\n)?```sh\n(.*?)^```$", re.M | re.S)


@dataclasses.dataclass(frozen=True)
class Example:
    line: int
    text: str

    def __str__(self) -> str:
        return f"{PAGE.name}:{self.line}"


def examples() -> Iterator[Example]:
    text = PAGE.read_text()
    for match in _BLOCK.finditer(text):
        mark, code = match.groups()
        if mark is None:
            yield Example(text.count("\n", 0, match.start()) + 1, code)


@pytest.fixture(scope="module")
def shell(
    trainer: System, admin_key: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """A folder with the reader's files, and the reader's environment."""
    folder = tmp_path_factory.mktemp("docs")
    write_adapter(folder / "invoices", lora_tensors(trainer.base_config, seed=3))
    Files(trainer, folder).chats()
    Files(trainer, folder).chats("more.jsonl", rows=5)
    command = folder / "bin" / "lorikeet"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lorikeet_cli "$@"\n')
    command.chmod(0o755)
    env = Cli(folder).environment(SERVER=trainer.base_url, API_KEY=admin_key)
    env["PATH"] = f"{command.parent}:{env['PATH']}"
    scopes = ("tenants:write", "keys:write", "adapters:write", "training:write")
    argv = [f"--scope={scope}" for scope in scopes]
    made = manage(trainer.env, "operator_key_create", "--name=docs", "--rotate", *argv)
    env["OPERATOR_KEY"] = last_json(made)["key"]
    return folder, env


@pytest.mark.parametrize("example", list(examples()), ids=str)
def test_an_example_runs(shell: tuple[Path, dict[str, str]], example: Example) -> None:
    folder, env = shell
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.text],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{example}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"{example} says nothing"


def test_the_uploads_of_the_adapters_page(shell: tuple[Path, dict[str, str]]) -> None:
    folder, env = shell
    text = (PAGE.parent / "adapters.md").read_text().partition("## Uploading")[2]
    command = text.split("```sh\n")[1].split("```")[0]
    program = text.split("```python\n")[1].split("```")[0]
    env = {**env, "LORIKEET_URL": env["SERVER"], "LORIKEET_API_KEY": env["API_KEY"]}
    for argv in (["bash", "-euo", "pipefail", "-c", command], [sys.executable, "-c", program]):
        done = subprocess.run(
            argv, env=env, cwd=folder, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "'is_uploaded': True" in done.stdout and done.stdout.endswith("uploaded\n")


def test_a_run_that_fails_says_why(trainer: System, cli: Cli, files: Files) -> None:
    """To who watches it, and to who asks later; the trainer's last lines are part of it."""
    cli.json("datasets", "upload", str(files.chats()), "--name=long-rows")
    adapter = trainer.tenants["acme"].adapter
    short = ("--set", "max_length=8", "--set", "max_steps=1")
    done = cli.run("runs", "start", adapter, "long-rows", *short, "--watch")
    assert done.code == 1, done.out
    runs = cli.json("runs", "list", "--adapter", adapter)["data"]
    [failed] = [run for run in runs if run["dataset"] == "long-rows"]
    assert failed["status"] == "failed" and "max_length" in failed["error"]
    assert "The run failed" in done.err and failed["error"] in done.err
    assert failed["error"] in cli.run("runs", "watch", failed["id"]).err


def test_every_command_has_an_example() -> None:
    named = {each.name or "" for each in app.registered_commands}
    for group in app.registered_groups:
        assert group.typer_instance is not None
        named |= {f"{group.name} {each.name}" for each in group.typer_instance.registered_commands}
    assert len(named) > 20
    text = "".join(code for _, code in _BLOCK.findall(PAGE.read_text()))
    assert [name for name in named if not re.search(rf"lorikeet {name}\b", text)] == []
