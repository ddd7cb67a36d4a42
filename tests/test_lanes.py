"""The lanes of `make test` run every test, each in one of them."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import lanes

NAMES = ("engine/test_a.py", "e2e/test_b.py", "engine/test_c.py", "e2e/test_d.py", "test_e.py")


def test_what_is_named_is_there() -> None:
    names = (*lanes.TOGETHER, *lanes.SLOW)
    assert [name for name in names if not (lanes.TESTS / name).exists()] == []


def test_each_test_is_taken_by_one_lane(tmp_path: Path) -> None:
    """Also those of a module whose tests are in two places."""
    places = (*NAMES, *NAMES[:2])
    items: list[Any] = [SimpleNamespace(path=lanes.TESTS / name) for name in places * 3]
    items.sort(key=lambda item: str(item.path), reverse=True)
    running = [lanes._taken(items, tmp_path) for _ in range(3)]
    taken: list[list[Any]] = [[] for _ in running]
    for lane, tests in itertools.cycle(enumerate(running)):
        if (item := next(tests, None)) is None:
            break
        taken[lane].append(item)
    for lane, tests in enumerate(running):
        taken[lane] += tests
    assert len(list(itertools.chain(*taken))) == len(items)
    assert {id(item) for item in itertools.chain(*taken)} == {id(item) for item in items}
    assert all(taken)


def test_a_platform_is_started_in_one_lane(tmp_path: Path) -> None:
    items: list[Any] = [SimpleNamespace(path=lanes.TESTS / name) for name in sorted(NAMES)]
    first, second = lanes._taken(items, tmp_path), lanes._taken(items, tmp_path)
    assert "e2e" in str(next(first).path), "what is slow begins"
    assert [item for item in second if "e2e" in str(item.path)] == []


def test_what_fails_is_noted(tmp_path: Path) -> None:
    notes = lanes.Failures(tmp_path)
    for name, failed in (("a", True), ("b", False), ("c d", True)):
        report: Any = SimpleNamespace(failed=failed, nodeid=name)
        notes.pytest_runtest_logreport(report)
    assert (tmp_path / "failed").read_text() == "a\nc d\n"


#: Takes the place of Python in `.ci/test`: the first lane says what failed, and a run without lanes
#: writes what it was asked to run.
PYTHON = """#!/usr/bin/env bash
for argument in "$@"; do
    if [[ $argument == --lanes=* ]]; then
        folder=${argument#--lanes=}
        mkdir "$folder/first" 2>/dev/null || exit 0
        printf "$FAILED" >"$folder/failed"
        exit "$CODE"
    fi
done
printf '%s\\n' "$@" >"$ASKED"
exit "$AGAIN"
"""


@pytest.mark.parametrize(
    ("code", "failed", "again", "expected", "is_again"),
    [
        (0, "", 0, 0, False),
        (1, "tests/a.py::test_b[c d]\\n", 0, 0, True),
        (1, "tests/a.py::test_b[c d]\\n", 1, 1, True),
        (1, "a\\nb\\nc\\nd\\n", 0, 1, False),  # four: not by chance
        (1, "", 0, 1, False),
        (2, "a\\n", 0, 2, False),  # interrupted
        (137, "a\\n", 0, 137, False),  # killed
    ],
)
def test_few_that_fail_run_again_alone(
    tmp_path: Path, code: int, failed: str, again: int, expected: int, is_again: bool
) -> None:
    python, asked = tmp_path / "python", tmp_path / "asked"
    python.write_text(PYTHON)
    python.chmod(0o755)
    told = {"FAILED": failed, "CODE": str(code), "AGAIN": str(again), "ASKED": str(asked)}
    done = subprocess.run(
        ["bash", str(lanes.TESTS.parent / ".ci" / "test"), str(python)],
        env={**os.environ, **told, "LANES": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == expected, done.stdout
    assert asked.exists() == is_again
    if is_again:
        assert "tests/a.py::test_b[c d]" in asked.read_text().splitlines()
        assert ("FLAKY" in done.stdout) == (again == 0)
