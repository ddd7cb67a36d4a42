"""FP8 bases through the GPU's decoder: scales on the way, adapters of all kinds beside.

Runs on a card under `make test-gpu`; elsewhere Triton's interpreter runs the same kernels.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.request import ORIGINAL
from tests.engine.model import int4_bases
from tests.engine.model.families import IN_FP8, save_family
from tests.engine.model.fp8_bases import FORMATS, keep_kv_in_fp8, make_fp8, save_checkpoint
from tests.engine.model.test_families import FamilyOracle, check, make_engine, save_adapters
from tests.engine.model.test_fp8 import TOLERANCE, round_matrices

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
CASES: list[tuple[str | None, int]] = [(None, 45), ("all", 15), ("dora", 7), ("kv", 20)]
# On a card the library's products want widths that are multiples of 16. Tensor cores add up FP8
# numbers in fewer bits than fp32 has, an error of some 1e-3, which rounds other activations to
# their neighbours. Weights are small so that this does not grow from layer to layer: with the usual
# ones, noise of 1e-3 on a CPU changes log-probabilities by 0.17 in the mean, with these by 0.03.
WIDE = {
    "hidden_size": 128,
    "num_attention_heads": 8,  # heads stay as wide as factors of rotations are many
    "intermediate_size": 192,
    "initializer_range": 0.05,
}
MEAN_TOLERANCE = 0.06
#: Of a family with norms behind its linears as well, where small weights do not help: noise of 3e-4
#: on a CPU changes its log-probabilities by 0.08 in the mean.
MEAN_TOLERANCES = {"gemma3": 0.12}


def families(*quick: str) -> list[Any]:
    """All that a GPU serves in FP8; the interpreter is slow, so there all but a few are long."""
    return [
        name if DEVICE == "cuda" or name in quick else pytest.param(name, marks=pytest.mark.long)
        for name in IN_FP8
    ]


def make_both(model: Any) -> None:
    """Quantise the linears, and keys and values, too."""
    make_fp8(model)
    keep_kv_in_fp8(model)


def play(
    oracle: FamilyOracle,
    cases: list[tuple[str | None, int]] = CASES,
    mean_tolerance: float = MEAN_TOLERANCE,
    **config: object,
) -> None:
    settings = {"device": DEVICE, "dtype": "float32", "use_triton": True, "max_running": 4}
    engine = make_engine(oracle, **{**settings, "max_step_tokens": 48, **config})
    check(engine, oracle, cases, num_tokens=4)
    assert oracle.mean_error < mean_tolerance
    engine.close()


@pytest.mark.parametrize("name", families("llama-biases", "qwen3-sliding"))
def test_a_base_quantised_at_load(tmp_path: Path, name: str) -> None:
    base = save_family(tmp_path / "base", name, **WIDE)
    oracle = FamilyOracle(base, save_adapters(base, tmp_path), make_fp8, TOLERANCE)
    bound = MEAN_TOLERANCES.get(name, MEAN_TOLERANCE)
    play(oracle, mean_tolerance=bound, base_precision="fp8")


@pytest.mark.parametrize("name", FORMATS if DEVICE == "cuda" else ["tensor-static"])
def test_a_checkpoint_of_each_format(tmp_path: Path, name: str) -> None:
    base = save_family(tmp_path / "base", "llama", **WIDE)
    matrices = save_checkpoint(base, tmp_path / "fp8", name)
    change = functools.partial(make_fp8, matrices=matrices)
    oracle = FamilyOracle(base, save_adapters(base, tmp_path), change, TOLERANCE)
    play(oracle, model_dir=tmp_path / "fp8")


@pytest.mark.parametrize("name", families("mistral"))
def test_keys_and_values_in_fp8(tmp_path: Path, name: str) -> None:
    base = save_family(tmp_path / "base", name, **WIDE)
    oracle = FamilyOracle(base, save_adapters(base, tmp_path), keep_kv_in_fp8, TOLERANCE)
    play(oracle, kv_precision="fp8", page_size=64)


def test_all_in_fp8(tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", "qwen2", **WIDE)
    adapters = save_adapters(base, tmp_path)
    for folder in adapters.values():
        round_matrices(folder)
    oracle = FamilyOracle(base, adapters, make_both, TOLERANCE)
    play(oracle, base_precision="fp8", kv_precision="fp8", adapter_precision="fp8", page_size=64)


def test_originals_beside_adapters_in_fp8(tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", "qwen2", **WIDE)
    copies, originals = (save_adapters(base, tmp_path / name) for name in ("fp8", "bf16"))
    for folder, kept in zip(copies.values(), originals.values(), strict=True):
        round_matrices(folder)
        round_matrices(kept, lambda tensor: tensor.bfloat16().float())
    kept_ones = {name + ORIGINAL: folder for name, folder in originals.items()}
    oracle = FamilyOracle(base, {**copies, **kept_ones})
    cases = [(None, 45), ("all" + ORIGINAL, 15), ("kv", 20), ("kv" + ORIGINAL, 7)]
    play(oracle, cases, adapter_precision="fp8")
    assert oracle.mean_error < 1e-3


@pytest.mark.parametrize("name", int4_bases.FORMATS if DEVICE == "cuda" else ["awq"])
def test_a_checkpoint_in_4_bits(tmp_path: Path, name: str) -> None:
    base = save_family(tmp_path / "base", "llama", **WIDE)
    weights = int4_bases.save_checkpoint(base, tmp_path / "int4", name)
    change = functools.partial(int4_bases.put_weights, dense=weights)
    oracle = FamilyOracle(base, save_adapters(base, tmp_path), change)
    play(oracle, model_dir=tmp_path / "int4")
