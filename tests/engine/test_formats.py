"""Every adapter format over every family's features: in fp32, what PEFT gives.

One table for a CPU, for Triton's interpreter and, under `make test-gpu`, for a card.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from tests.engine.families import FAMILIES, save_family
from tests.engine.formats import BLENDS, FORMATS, NARROW, NARROW_BLENDS, FormatOracle, check
from tests.engine.formats import make_engine as make

MakeOracle = Callable[[str], FormatOracle]
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Between them biases, a tied head, windows, norms of q and k; the interpreter is slow.
CHOSEN = ["llama-biases", "mistral", "qwen2", "qwen3-biases"]
on_a_card = pytest.mark.gpu if torch.cuda.is_available() else lambda test: test


@pytest.fixture(scope="module")
def make_oracle(tmp_path_factory: pytest.TempPathFactory) -> MakeOracle:
    made: dict[str, FormatOracle] = {}

    def make(name: str) -> FormatOracle:
        if name not in made:
            base = save_family(tmp_path_factory.mktemp("family"), name)
            made[name] = FormatOracle(base, tmp_path_factory.mktemp("adapters"))
        return made[name]

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_step_tokens", [512, 29], ids=["whole", "chunked"])
def test_formats_on_a_cpu(make_oracle: MakeOracle, family: str, max_step_tokens: int) -> None:
    oracle = make_oracle(family)
    engine = make(oracle, max_step_tokens=max_step_tokens)
    check(engine, oracle, [*FORMATS, *BLENDS], first_length=18, num_tokens=6)
    engine.close()


@on_a_card
@pytest.mark.parametrize("family", CHOSEN if IS_INTERPRETED else FAMILIES)
@pytest.mark.parametrize(
    "names", [[*NARROW, *NARROW_BLENDS], [*FORMATS, *BLENDS]], ids=["graphs", "all"]
)
def test_formats_on_a_gpu(make_oracle: MakeOracle, family: str, names: list[str]) -> None:
    """By graphs, and, with what is as wide as the vocabulary, launch by launch."""
    oracle = make_oracle(family)
    engine = make(
        oracle,
        device="cpu" if IS_INTERPRETED else "cuda",
        dtype="float32",
        use_triton=True,
        max_running=16,
        max_step_tokens=96,
    )
    check(engine, oracle, names, first_length=3, num_tokens=2)
    engine.close()
