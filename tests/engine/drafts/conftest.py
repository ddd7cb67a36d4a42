"""Adapters that have draft heads, and engines that know them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import Engine
from tests.engine.conftest import MakeEngine
from tests.engine.drafts.headed import random_heads, with_heads


@pytest.fixture(scope="session")
def headed(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters with random heads, by name."""
    folder = tmp_path_factory.mktemp("headed")
    return {
        name: with_heads(adapters[name], folder / name, random_heads(seed))
        for seed, name in enumerate(("all-4", "qv-16", "dora", "ends"))
    }


@pytest.fixture
def make_headed(make_engine: MakeEngine, headed: dict[str, Path]) -> MakeEngine:
    """Engines that know those as "all-4+heads" and so on, beside the others."""

    def make(**config: Any) -> Engine:
        engine = make_engine(**{"arena_bytes": 8 << 20, **config})
        for name, path in headed.items():
            engine.register_adapter(f"{name}+heads", path)
        return engine

    return make
