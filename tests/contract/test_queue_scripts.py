"""The Lua beside `contract.queue.scripts`: whole, and found wherever the package is copied to."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import contract
from contract.messages.protocol import MAX_ATTEMPTS
from contract.queue import scripts
from contract.queue.fair_queue import OUTPUT_WEIGHT

NAMES = sorted(path.stem for path in Path(scripts.__file__).parent.glob("*.lua"))


def test_includes_and_constants_are_filled_in() -> None:
    publish = scripts.load("publish")
    assert "local function finish(" in publish
    assert f"{OUTPUT_WEIGHT} * output" in publish
    assert f"> {MAX_ATTEMPTS} then" in publish
    assert "'HSET', 'quar:{' .. pool .. '}', digest" in publish
    assert "local job = 'job:{' .. pool .. '}:' .. id\n" in scripts.load("pull")
    for name in NAMES:
        assert re.findall(r"--#include.*|\{[A-Z_]+\}|_key\(", scripts.load(name)) == []


def test_each_is_found_where_the_package_is_only_copied(tmp_path: Path) -> None:
    shutil.copytree(Path(contract.__file__).parent, tmp_path / "contract")
    program = (
        "from contract.queue import scripts\n"
        f"print(scripts.__file__, *(len(scripts.load(name)) for name in {NAMES!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    path, *lengths = done.stdout.split()
    assert path.startswith(str(tmp_path))
    assert lengths == [str(len(scripts.load(name))) for name in NAMES]
