"""Free memory is divided between runs and activations."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.errors import OutOfMemory
from engine.model.config import ModelConfig
from engine.model.weights import LayerWeights
from engine.training.memory import (
    bytes_per_element,
    dense_bytes,
    elements_of,
    kept_bytes,
    plan_memory,
)
from engine.training.run import RunSettings
from kernels.fp8 import FP8, Fp8Matrix
from kernels.int4 import Int4Matrix

#: Llama-3.1-8B's.
LARGE = ModelConfig.from_fields(
    {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
    },
    None,
)
RUN = elements_of(LARGE, RunSettings(rank=16))
GIB = 1 << 30


def plan(free: int, runs: int, budget: int = 16_384) -> tuple[int, int]:
    found = plan_memory(
        LARGE, torch.bfloat16, free_bytes=free, token_budget=budget, wanted_elements=runs * RUN,
        least_elements=RUN,
    )  # fmt: skip
    return found.pool_elements // RUN, found.num_recomputed


def test_an_h200_holds_64_runs_and_16k_tokens_of_an_8b_model_without_recomputing() -> None:
    assert plan(123 * GIB, 64) == (64, 0)


def test_less_memory_means_more_recomputed_then_fewer_runs() -> None:
    runs, recomputed = zip(*[plan(free * GIB, 64) for free in range(120, 20, -10)], strict=True)
    assert list(runs) == sorted(runs, reverse=True)
    assert recomputed[0] < 32 and recomputed[-1] > 0 and runs[-1] < 64
    assert all(0 <= layers <= 32 for layers in recomputed)


def test_what_is_planned_fits() -> None:
    for free in (20, 30, 40, 80):
        runs, recomputed = plan(free * GIB, 64)
        kept = (32 - recomputed) * kept_bytes(LARGE, torch.bfloat16) * 16_384
        assert runs >= 1
        assert runs * RUN * bytes_per_element(torch.bfloat16) + kept < free * GIB


def test_runs_that_come_later_get_what_costs_nobody_anything() -> None:
    for free in (40, 60, 90, 120):
        found = [
            plan_memory(
                LARGE, torch.bfloat16, free_bytes=free * GIB, token_budget=16_384,
                wanted_elements=4 * RUN, least_elements=RUN, later_elements=later * RUN,
            )
            for later in (0, 60)
        ]  # fmt: skip
        assert found[0].num_recomputed == found[1].num_recomputed
        assert found[0].pool_elements <= found[1].pool_elements <= 64 * RUN
        kept = (32 - found[1].num_recomputed) * kept_bytes(LARGE, torch.bfloat16) * 16_384
        pool = found[1].pool_elements * bytes_per_element(torch.bfloat16)
        assert pool + kept < free * GIB
    assert found[1].pool_elements > 40 * RUN


@pytest.mark.parametrize(("name", "share"), [("fp8", 8), ("blocks", 12), ("int4", 2)])
def test_what_a_product_makes_dense_of_a_quantised_base_is_counted(name: str, share: int) -> None:
    """Of the widest linear, as one product is computed at a time; a dense base takes nothing."""
    numbers = torch.empty(64, 32).to(FP8)
    bases: dict[str, Fp8Matrix | Int4Matrix] = {
        "fp8": Fp8Matrix(numbers, torch.ones(64)),
        "blocks": Fp8Matrix(numbers, torch.ones(64), groups=torch.ones(64, 1)),
        "int4": Int4Matrix(torch.empty(64, 4).int(), torch.ones(64, 1), torch.zeros(64, 1)),
    }
    plain = torch.empty(128, 32)
    norm = torch.ones(32)
    layers = [
        LayerWeights(
            attention_norm=norm, qkv=plain, o=plain, mlp_norm=norm, gate_up=matrix, down=plain
        )
        for matrix in (bases[name], plain)
    ]
    assert dense_bytes(layers, torch.bfloat16) == 64 * 32 * share
    assert dense_bytes(layers[1:], torch.bfloat16) == 0
    given: dict[str, int] = {
        "token_budget": 16_384, "wanted_elements": 64 * RUN, "least_elements": RUN,
    }  # fmt: skip
    widest = 28_672 * 4096 * 8
    of_less = plan_memory(LARGE, torch.bfloat16, free_bytes=40 * GIB, **given, dense_bytes=widest)
    with_all = plan_memory(LARGE, torch.bfloat16, free_bytes=40 * GIB, **given)
    assert of_less.pool_elements < with_all.pool_elements


def test_no_room_for_a_single_run_is_said() -> None:
    with pytest.raises(OutOfMemory, match="MiB more"):
        plan(2 * GIB, 64)


def test_an_adapter_takes_its_own_parameters_and_hardly_more() -> None:
    assert elements_of(LARGE, RunSettings(rank=16)) == 41_943_040
    few = dataclasses.replace(RunSettings(rank=1), target_modules=("k_proj",))
    assert elements_of(LARGE, few) == 32 * (4096 + 1024)
