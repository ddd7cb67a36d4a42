"""A folder in FP8 or 4 bits is served with no setting but its own; others quantise what is not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import save_adapter
from tests.engine.model import fp8_bases, int4_bases
from tests.engine.model.families import save_family
from tests.engine.model.test_families import FamilyOracle, check
from tests.engine.model.test_fp8 import MEAN_TOLERANCE, TOLERANCE
from worker.config import WorkerConfig
from worker.engine_process.process import create_engine


def make(kind: str, base: Path, folder: Path) -> tuple[Callable[[Any], None], dict[str, str]]:
    """What to do to Hugging Face's model, and the worker's settings."""
    if kind == "a folder in FP8":
        matrices = fp8_bases.save_checkpoint(base, folder, "fp8-blocks")
        change = functools.partial(fp8_bases.make_fp8, matrices=matrices)
        return change, {"LORIKEET_BASE_MODEL": str(folder)}
    if kind == "a folder in 4 bits":
        dense = int4_bases.save_checkpoint(base, folder, "awq")
        change = functools.partial(int4_bases.put_weights, dense=dense)
        return change, {"LORIKEET_BASE_MODEL": str(folder)}
    if kind == "FP8 at load":
        return fp8_bases.make_fp8, {"LORIKEET_BASE_PRECISION": "fp8"}
    return fp8_bases.keep_kv_in_fp8, {"LORIKEET_KV_PRECISION": "fp8"}


@pytest.mark.parametrize("kind", ["a folder in FP8", "a folder in 4 bits", "FP8 at load", "FP8 KV"])
def test_one_setting_serves_it(tmp_path: Path, kind: str) -> None:
    base = save_family(tmp_path / "base", "qwen3")
    adapter = save_adapter(base, tmp_path / "adapter", r=2, target_modules=["q_proj"])
    change, settings = make(kind, base, tmp_path / "stored")
    environment = {
        "LORIKEET_BASE_MODEL": str(base),
        "LORIKEET_ARENA_BYTES": str(4 << 20),
        "REDIS_URL": "redis://127.0.0.1:1/0",
        "S3_ENDPOINT_URL": "http://127.0.0.1:2",
        "S3_ACCESS_KEY_ID": "id",
        "S3_SECRET_ACCESS_KEY": "secret",
    }
    oracle = FamilyOracle(base, {"a": adapter}, change, TOLERANCE)
    engine: Any = create_engine(WorkerConfig.from_environment(environment | settings))
    check(engine, oracle, [(None, 30), (None, 9)])
    assert 0 < oracle.mean_error < MEAN_TOLERANCE
    engine.close()
