"""Where the kernels run: the card for `-m gpu`, Triton's interpreter on a CPU otherwise."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.kernels import bounds

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import speed_up

    speed_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that takes `device` is a GPU test as well; without a card it is only that.

    The interpreter runs all cases of a test in float32, in float16 the last one, which has most in
    it, and the one in the middle; all of them in float16 are for `make test-long`.
    """
    if torch.cuda.is_available():
        for item in items:
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
        return
    halves: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if _dtype(item) == "float16":
            halves[item.nodeid.partition("[")[0]].append(item)
    for cases in halves.values():
        kept = (cases[len(cases) // 2], cases[-1])
        for item in cases:
            if item not in kept:
                item.add_marker(pytest.mark.long)


def _dtype(item: pytest.Item) -> object:
    """The dtype's name, of a test of this folder that takes one."""
    call = getattr(item, "callspec", None)
    is_ours = item.path.is_relative_to(Path(__file__).parent)
    return call.params.get("dtype") if call is not None and is_ours else None


@pytest.fixture(autouse=True)
def in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter no kernel reaches past its tensors unnoticed."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        bounds.watch(monkeypatch)


@pytest.fixture
def device() -> str:
    """Where this test's tensors live."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.fixture(params=["float32", "float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    """The interpreter computes bf16 matrix products wrongly, so there it is skipped."""
    if device == "cpu" and request.param == "bfloat16":
        pytest.skip("the interpreter has no bf16 matrix product")
    return getattr(torch, request.param)
