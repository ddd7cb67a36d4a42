"""Gated delta nets in the GPU's pass: their states through graphs, chunks, prefixes, preemption.

Runs on a card under `make test-gpu`; elsewhere Triton's interpreter runs the same kernels. The
answers are those of the reference on a CPU, or Hugging Face's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from engine.errors import UnsupportedModel
from engine.execution.gpu_runner import Tokens
from engine.model.config import ModelConfig
from engine.sampling.sampler import Sampled
from engine.stats import PreemptionCause
from tests.engine.conftest import SMALL, prompt, request, run, save_adapter
from tests.engine.model.families import save_family, targets
from tests.engine.model.test_families import MakeOracle, check, make_engine, make_oracle

__all__ = ["make_oracle"]

if torch.cuda.is_available():
    pytestmark = pytest.mark.gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
GPU: dict[str, Any] = {
    "device": DEVICE, "dtype": "float32", "use_triton": True, "max_running": 4,
}  # fmt: skip
PAGE = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("hybrid"), "qwen3_5")


@pytest.fixture(scope="module")
def plain(base: Path) -> Iterator[Engine]:
    engine = Engine(EngineConfig(model_dir=base, prefix_cache=False, **SMALL))
    yield engine
    engine.close()


def make_gpu_engine(base: Path, num_pages: int = 96, **config: Any) -> Engine:
    given: dict[str, Any] = {"model_dir": base, **SMALL, **GPU, **config}
    page_bytes = EngineConfig(**given).page_bytes(ModelConfig.from_folder(base))
    return Engine(EngineConfig(**{**given, "arena_bytes": num_pages * page_bytes}))


def ask(engine: Engine, plain: Engine, prompts: list[list[int]], **sampling: Any) -> list[int]:
    """Ask both for all of them at once; the cached tokens of each."""
    asked = [request(str(i), each, **sampling) for i, each in enumerate(prompts)]
    got, wanted = run(engine, *asked, check=True), run(plain, *asked)
    assert {n: r.token_ids for n, r in got.items()} == {n: r.token_ids for n, r in wanted.items()}
    lasts = [got[str(i)].last for i in range(len(prompts))]
    return [last.num_cached_tokens for last in lasts if last is not None]


def test_states_are_kept_in_pages_of_the_prefix_cache(base: Path, plain: Engine) -> None:
    # The last token of the prompt is a chunk of its own: a decode's graph computes it. The state
    # behind it is kept, so that the next step writes to other pages.
    engine, common = make_gpu_engine(base, max_step_tokens=PAGE - 1), prompt(1, 2 * PAGE)
    own = [prompt(10 + i, 5) for i in range(2)]
    assert ask(engine, plain, [common], max_tokens=4) == [0]
    both = [common + each for each in own]
    assert ask(engine, plain, both, max_tokens=3) == [2 * PAGE] * 2
    engine.close()


def test_narrow_heads_in_16_bits_are_refused(base: Path) -> None:
    with pytest.raises(UnsupportedModel, match="128 wide") as raised:
        make_gpu_engine(base, dtype="bfloat16")
    assert raised.value.param == "dtype"


def test_chunks_and_preemption(base: Path, plain: Engine) -> None:
    """Each begins with one page beside its state; there is none for the third page of each."""
    num_states = EngineConfig(model_dir=base).state_pages(ModelConfig.from_folder(base))
    engine = make_gpu_engine(base, num_pages=3 * (2 + num_states), max_step_tokens=9)
    ask(engine, plain, [prompt(20 + i, 13 + i) for i in range(3)], max_tokens=26)
    assert engine.stats().num_preemptions > 0
    engine.close()


def test_a_state_that_followed_from_a_wrong_guess_is_computed_again(
    base: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {"temperature": 2.0, "seed": 4, "top_p": 0.95, "max_tokens": 5}
    requests = [request("r", prompt(1, 5), **drawn), request("s", prompt(2, 7), max_tokens=6)]
    wanted = run(plain, *requests)
    monkeypatch.setattr("engine.sampling.sampler._NUM_CANDIDATES", 2)
    wrong, sampled = [], Tokens.sampled

    def spy(tokens: Tokens) -> list[Sampled]:
        out = sampled(tokens)
        wrong.append(tokens.were_wrong)
        return out

    monkeypatch.setattr(Tokens, "sampled", spy)
    engine = make_gpu_engine(base)
    got = run(engine, *requests, check=True)
    assert any(wrong)
    assert engine.stats().preemptions[PreemptionCause.GUESS] > 0
    assert {n: r.token_ids for n, r in got.items()} == {n: r.token_ids for n, r in wanted.items()}
    engine.close()


def test_adapters_of_every_kind_in_chunks(make_oracle: MakeOracle) -> None:
    oracle = make_oracle("qwen3_5")
    engine = make_engine(oracle, **GPU, max_step_tokens=24)
    check(engine, oracle, [("dora", 20), ("biases", 9), (None, 17), ("kv", 1)], num_tokens=3)
    engine.close()


def test_rank_stabilised_adapters(base: Path, plain: Engine, tmp_path: Path) -> None:
    modules = targets(base, ["q_proj", "k_proj", "o_proj", "down_proj"])
    config: dict[str, Any] = {
        "r": 9,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": modules,
    }
    engine, folder = make_gpu_engine(base), save_adapter(base, tmp_path / "rs", 3, **config)
    for each in (engine, plain):
        each.register_adapter("rs", folder)
    ask(engine, plain, [prompt(30, 18)], adapter="rs", max_tokens=3)
    engine.close()
