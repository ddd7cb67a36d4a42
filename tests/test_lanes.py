"""The lanes of `make test` run every test, each in one of them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
