"""Every example, run as the README says, over the tiny model."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import save_model

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"

# Example -> what it prints, in order.
PRINTS = {
    "many_adapters": [r"^base: ", r"^pirate: ", r"^poet: ", r"^\{'pirate': 0\.5", r"^2 adapters"],
    "blend_sweep": [r"^pirate 1\.0, poet 0\.0: ", r"^pirate 0\.0, poet 1\.0: "],
    "json_schema": [r"^base: \{'capital': ", r"^pirate: \{'capital': "],
    "loaded_model": [r"^ours: ", r"^poet: ", r"^transformers: "],
    "streaming": [r"^\[(length|stop), \d+ tokens\]$"],
    "more_than_memory": [r"^client-0: ", r"^client-23: ", r"a pool of \d", r"^24 adapters"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Small pages, so that adapters fill some; and a context for the longest of the questions.
    return save_model(tmp_path_factory.mktemp("base"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@functools.cache
def _run(name: str, base: Path, work: Path) -> subprocess.CompletedProcess[str]:
    """Run an example, once for each base and folder."""
    return subprocess.run(
        [sys.executable, f"examples/{name}.py", "--base", str(base), "--work", str(work)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("name", PRINTS)
def test_it_runs_and_prints(name: str, base: Path, work: Path) -> None:
    pytest.importorskip("peft")
    ran = _run(name, base, work)
    assert ran.returncode == 0, ran.stderr
    place = 0
    for pattern in PRINTS[name]:
        found = re.compile(pattern, re.MULTILINE).search(ran.stdout, place)
        assert found, f"{pattern} is not in what follows character {place} of\n{ran.stdout}"
        place = found.end()


def test_ours_and_transformers_say_the_same(base: Path, work: Path) -> None:
    pytest.importorskip("peft")
    printed = _run("loaded_model", base, work).stdout
    [ours] = re.findall(r"^ours: (.*?)^poet: ", printed, re.MULTILINE | re.DOTALL)
    [theirs] = re.findall(r"^transformers: (.*)", printed, re.MULTILINE | re.DOTALL)
    assert ours == theirs


def test_every_example_is_run_and_in_the_readme() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"samples"}
    assert names == PRINTS.keys()
    readme = (ROOT / "README.md").read_text()
    assert all(f"examples/{name}.py" in readme for name in names)
