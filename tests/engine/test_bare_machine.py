"""The tests of a card can be collected where only what the engine itself needs is installed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = ("torch", "triton", "transformers", "safetensors", "numpy", "peft", "pytest")
# Before pytest is imported: what is refused cannot be found.
COLLECT = """
import json, sys
refused = set(json.loads(sys.argv[1]))
class Finder:
    def __init__(self, finder):
        self._finder = finder
    def find_spec(self, name, path=None, target=None):
        is_refused = name.partition(".")[0] in refused
        return None if is_refused else self._finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self._finder, name)
sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path]
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def needed(name: str, found: set[str]) -> set[str]:
    """`found`, and the distribution with all that it requires."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in found:
        return found
    try:
        requires = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    found.add(name)
    for line in requires:
        requirement = re.match(r"[\w.-]+", line)
        if requirement and "extra ==" not in line:
            needed(requirement[0], found)
    return found


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="not on the card itself")
def test_gpu_tests_are_collected_without_the_platforms_packages() -> None:
    have: set[str] = set()
    for name in INSTALLED:
        needed(name, have)
    packages = importlib.metadata.packages_distributions()
    refused = [
        top
        for top, owners in packages.items()
        if not any(re.sub(r"[-_.]+", "-", owner).lower() in have for owner in owners)
    ]
    assert {"django", "redis", "hypothesis", "outlines"} <= set(refused)
    args = ["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "ignore"]
    folders = ["tests/kernels", "tests/engine"]
    ran = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(refused), *args, *folders],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert "tests/engine/execution/test_gpu.py::" in ran.stdout
