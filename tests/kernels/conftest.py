"""Where the kernels run: the card for `-m gpu`, Triton's interpreter on a CPU otherwise."""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels import bounds

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import speed_up

    speed_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that takes `device` is a GPU test as well; without a card it is only that."""
    for item in items:
        if "device" in getattr(item, "fixturenames", ()) and torch.cuda.is_available():
            item.add_marker(pytest.mark.gpu)


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
