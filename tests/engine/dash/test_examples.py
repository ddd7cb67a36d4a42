"""Every example, over the tiny model: one as the README says, the others in one process."""

from __future__ import annotations

import json
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
    "drafts": [
        r"^no drafts: 1\.00 tokens",
        r"^drafts: (?:[2-9]|\d\d)\.\d+ tokens",
        r"^  forced: [1-9]",
        r"^the same answers: True",
    ],
    "json_schema": [r"^base: \{'capital': ", r"^pirate: \{'capital': "],
    "loaded_model": [r"^ours: ", r"^poet: ", r"^transformers: "],
    "streaming": [r"^\[(length|stop), \d+ tokens\]$"],
    "more_than_memory": [r"^client-0: ", r"^client-23: ", r"a pool of \d", r"^24 adapters"],
}
#: Runs as the README says, in a process of its own.
ALONE = "many_adapters"
#: argv: the base, the folder of adapters, examples. Prints what each printed, as JSON.
TOGETHER = """
import contextlib, io, json, runpy, sys
base, work, *names = sys.argv[1:]
sys.path.insert(0, "examples")
printed = {}
for name in names:
    sys.argv = [f"{name}.py", "--base", base, "--work", work]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(f"examples/{name}.py", run_name="__main__")
    printed[name] = output.getvalue()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Small pages, so that adapters fill some; and a context for the longest of the questions.
    return save_model(tmp_path_factory.mktemp("base"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def printed(base: Path, work: Path) -> dict[str, str]:
    """What each example prints; that most share a process spares their imports, 4 s each."""
    pytest.importorskip("peft")
    others = [name for name in PRINTS if name != ALONE]
    alone = _run(f"examples/{ALONE}.py", "--base", str(base), "--work", str(work))
    return {ALONE: alone, **json.loads(_run("-c", TOGETHER, str(base), str(work), *others))}


def _run(*argv: str) -> str:
    ran = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("name", PRINTS)
def test_it_runs_and_prints(name: str, printed: dict[str, str]) -> None:
    place = 0
    for pattern in PRINTS[name]:
        found = re.compile(pattern, re.MULTILINE).search(printed[name], place)
        assert found, f"{pattern} is not in what follows character {place} of\n{printed[name]}"
        place = found.end()


def test_ours_and_transformers_say_the_same(printed: dict[str, str]) -> None:
    said = printed["loaded_model"]
    [ours] = re.findall(r"^ours: (.*?)^poet: ", said, re.MULTILINE | re.DOTALL)
    [theirs] = re.findall(r"^transformers: (.*)", said, re.MULTILINE | re.DOTALL)
    assert ours == theirs


def test_every_example_is_run_and_in_the_readme() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"samples"}
    assert names == PRINTS.keys()
    readme = (ROOT / "README.md").read_text()
    assert all(f"examples/{name}.py" in readme for name in names)
