"""The command line installs from this repository and needs nothing else of it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from lorikeet_cli import __version__

from tests.cli.runner import ROOT

PACKAGE = ROOT / "cli"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command, installed into an environment of its own from a wheel that pip builds."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    source = folder / "source"
    source.mkdir()
    # setuptools leaves its build folder beside the source, which has links into `contract`.
    subprocess.run(["cp", "-r", str(PACKAGE), str(ROOT / "contract"), str(source)], check=True)
    build = [*pip, "wheel", str(source / "cli"), "--no-deps", "--no-build-isolation", f"-w{folder}"]
    subprocess.run(build, check=True, cwd=folder)
    (wheel,) = folder.glob("lorikeet_cli-*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    # Its dependencies are those of this environment: a test does not download.
    site = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, cwd=folder)
    return folder / "venv" / "bin" / "lorikeet"


def run(command: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {"HOME": str(command.parent), "PATH": os.environ["PATH"], **env}
    return subprocess.run(
        [str(command), *argv], env=clean, cwd="/", capture_output=True, text=True, check=False
    )


def test_the_installed_command_runs(installed: Path) -> None:
    done = run(installed, "--version")
    assert (done.returncode, done.stdout) == (0, f"lorikeet {__version__}\n"), done.stderr
    done = run(installed, "adapters", "list")
    assert done.returncode == 3 and "lorikeet login" in done.stderr


def test_the_installed_command_converts_rows(installed: Path, tmp_path: Path) -> None:
    rows, new = tmp_path / "rows.jsonl", tmp_path / "new.jsonl"
    rows.write_text('{"instruction": "Hi", "output": "Hello"}\n')
    done = run(installed, "datasets", "convert", str(rows), str(new))
    assert done.returncode == 0 and new.read_text().startswith('{"messages": '), done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_it_completes_in_a_shell(installed: Path, shell: str) -> None:
    env = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = run(installed, "--show-completion", shell, **env)
    assert done.returncode == 0 and "_LORIKEET_COMPLETE" in done.stdout, done.stderr


def test_a_word_is_completed(installed: Path) -> None:
    env = {"_LORIKEET_COMPLETE": "complete_bash", "COMP_WORDS": "lorikeet ad", "COMP_CWORD": "1"}
    assert run(installed, **env).stdout.split() == ["adapters"]


def test_the_wheel_needs_what_it_imports() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    needed = {each.partition(">")[0] for each in project["dependencies"]}
    code = (
        "import sys, lorikeet_cli.app, rich.progress\n"
        "print('\\n'.join({name.partition('.')[0] for name in sys.modules}))"
    )
    env = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert needed <= loaded
    ours = {"controlplane", "worker", "engine", "kernels", "contract", "demo", "lora_dash"}
    assert not ours & loaded
