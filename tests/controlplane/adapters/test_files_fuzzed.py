"""Mutations of good files in a sealed child: each is accepted or rejected, in bounded time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.infra.sealed_child import Bounds, run_sealed
from tests.controlplane.adapters import files
from tests.controlplane.conftest import TINY_CONFIG

#: A config in which all fields that are parsed are there.
CONFIG = files.config_bytes(
    rank_pattern={"q_proj": 4, r".*\.v_proj": 4},
    alpha_pattern={"layers.0": 8},
    exclude_modules=["lm_head"],
    layers_to_transform=[0, 1],
    modules_to_save=None,
    use_rslora=True,
    base_model_name_or_path="org/tiny",
    bias="none",
)


def fuzz(folder: Path, *, seed: int, rounds: int) -> dict[str, Any]:
    (folder / "c").write_bytes(CONFIG)
    (folder / "t").write_bytes(files.GOOD_TENSORS)
    work = {
        "seed": seed,
        "rounds": rounds,
        "base": TINY_CONFIG,
        "base_name": "tiny",
        "base_names": ["org/tiny"],
        "base_revision": "",
        "max_rank": 256,
        "is_base_accepted": False,
    }
    with (folder / "c").open("rb") as config, (folder / "t").open("rb") as tensors:
        bounds = Bounds(
            memory_bytes=192 << 20, cpu_s=30 + rounds // 20, wall_s=3600, answer_bytes=10_000
        )
        module = "tests.contract.fuzz_work"
        return run_sealed(module, work, [config, tensors], environment={}, bounds=bounds).answer


@pytest.mark.parametrize("seed", range(3))
def test_mutations_are_accepted_or_rejected(tmp_path: Path, seed: int) -> None:
    ends = fuzz(tmp_path, seed=seed, rounds=700)
    assert ends["accepted"] + ends["rejected"] == 700
    assert ends["rejected"] > 350
    assert ends["slowest_s"] < 3


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 110))
def test_many_mutations_are_accepted_or_rejected(tmp_path: Path, seed: int) -> None:
    ends = fuzz(tmp_path, seed=seed, rounds=20_000)
    assert ends["accepted"] + ends["rejected"] == 20_000
    assert ends["slowest_s"] < 5
