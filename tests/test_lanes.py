"""The lanes of `make test` run every test, each in one of them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import lanes

NAMES = ("engine/test_a.py", "e2e/test_b.py", "engine/test_c.py", "e2e/test_d.py", "test_e.py")


def test_what_is_named_is_there() -> None:
    names = (*lanes.TOGETHER, *lanes.SLOW)
    assert [name for name in names if not (lanes.TESTS / name).exists()] == []


@pytest.mark.parametrize("listed", [lanes.SLOW_TESTS, lanes.LARGE_TESTS])
def test_each_slow_and_each_large_test_is_there(listed: Path) -> None:
    """One whose name was changed would be in `make test-quick` or `make test` again."""
    missing = []
    for name in [line.split()[0] for line in listed.read_text().splitlines()]:
        module, *_, function = name.split("::")
        path = lanes.TESTS / module
        if not path.exists() or f"def {function}(" not in path.read_text():
            missing.append(name)
    assert missing == []


def test_slow_tests_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, seconds = tmp_path / "slow", tmp_path / "seconds"
    noted.write_text("test_a.py::test_old\n")
    seconds.write_text("0.3 test_b.py::test_cases\n0.3 test_b.py::test_cases\n0.1 c.py::test_c\n")
    monkeypatch.setattr(lanes, "SLOW_TESTS", noted)
    lanes._slow_tests.cache_clear()
    lanes.note_slow(seconds)
    lanes._slow_tests.cache_clear()
    assert noted.read_text() == "test_a.py::test_old\ntest_b.py::test_cases\n"


def test_large_tests_are_left_out_or_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "_large_tests", lambda: {"a.py::test_many": 8, "a.py::test_one": 0})
    many = [f"tests/a.py::test_many[{i}]" for i in range(17)]
    items: list[Any] = [
        SimpleNamespace(nodeid=name)
        for name in (*many, "tests/a.py::test_one", "tests/a.py::test_one_more")
    ]
    left_out = {item.nodeid for item in lanes.large(items)}
    assert left_out == {*many, "tests/a.py::test_one"} - {many[0], many[8], many[16]}


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


#: Three lanes, each of which runs the test of the file that is named.
PROGRAM = """
import sys
from pathlib import Path
import pytest
from tests.forked_lanes import fork_lanes

class Lanes:
    worst = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        self.worst = fork_lanes(session.config, Path(sys.argv[1]), 3)
        return None if self.worst is None else True

lanes = Lanes()
code = pytest.main([sys.argv[2]], plugins=[lanes])
sys.exit(int(code) if lanes.worst is None else lanes.worst)
"""
#: The lane that makes the folder meets its end in it.
ONE_OF_THREE = """
import os, signal
from pathlib import Path

def test_it():
    try:
        (Path(__file__).parent / "mine").mkdir()
    except FileExistsError:
        return
    {end}
"""


@pytest.mark.parametrize(
    ("end", "expected", "summaries"),
    [
        ("pass", 0, 3),
        ("assert False", 1, 3),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, 2),
        ("os.kill(os.getppid(), signal.SIGINT); signal.pause()", 2, 2),
    ],
)
def test_the_first_process_has_the_worst_status(
    tmp_path: Path, end: str, expected: int, summaries: int
) -> None:
    """And shows what each lane wrote; ended, it ends them."""
    test = tmp_path / "test_it.py"
    test.write_text(ONE_OF_THREE.format(end=end))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(test)],
        cwd=lanes.TESTS.parent,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    if expected != 2:
        assert done.stdout.count(" in 0.") == summaries, done.stdout


#: Takes the place of Python in `.ci/test`: the run in lanes says what failed, and a run without
#: them writes what it was asked to run.
PYTHON = """#!/usr/bin/env bash
for argument in "$@"; do
    if [[ $argument == --lanes=* ]]; then
        printf "$FAILED" >"${argument#--lanes=}/failed"
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
        arguments = asked.read_text().splitlines()
        assert "tests/a.py::test_b[c d]" in arguments
        assert arguments.count("-m") == 1, "a selection besides `-m pytest` could leave it out"
        assert ("FLAKY" in done.stdout) == (again == 0)
