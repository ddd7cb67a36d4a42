"""Every family through the GPU's decoder: prefill, decode graphs, windows, biases and head norms.

Runs on a card under `make test-gpu`; elsewhere Triton's interpreter runs the same kernels.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.engine.model.families import ON_A_GPU
from tests.engine.model.test_families import MakeOracle, check, make_engine, make_oracle

__all__ = ["make_oracle"]

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Prompts longer than the window and than the original context; decodes cross into a new page.
CASES: list[tuple[str | None, int]] = [(None, 45), ("all", 15), ("kv", 20)]
# The interpreter is slow: models that have most between them; the others are long.
QUICK = ("qwen3-yarn", "gemma3", "qwen3_moe")
CHOSEN = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ON_A_GPU
]


@pytest.mark.parametrize("name", ON_A_GPU if DEVICE == "cuda" else CHOSEN)
def test_mixed_batch_equals_hugging_face(make_oracle: MakeOracle, name: str) -> None:
    oracle = make_oracle(name)
    engine = make_engine(
        oracle,
        device=DEVICE,
        dtype="float32",
        use_triton=True,
        max_running=4,
        max_step_tokens=48,
    )
    has_experts = engine.model.plan.experts is not None
    check(engine, oracle, [*CASES, ("dora", 3)] if has_experts else CASES, num_tokens=4)
    engine.close()
