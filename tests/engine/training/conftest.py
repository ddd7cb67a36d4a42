"""The tiny base that most tests of training share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.model.families import save_family


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("training") / "llama", "llama")
