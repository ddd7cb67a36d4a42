"""Quantised bases with what adapters, memory and drafts do beside them: still Hugging Face's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from tests.engine.conftest import LINEARS, prompt, request, run, save_adapter
from tests.engine.model import fp8_bases, int4_bases
from tests.engine.model.families import save_family
from tests.engine.model.test_families import FamilyOracle, check, make_engine
from tests.engine.model.test_fp8 import MEAN_TOLERANCE, TOLERANCE

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 8, "target_modules": LINEARS},
    "rs": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": LINEARS},
    "ends": {"r": 5, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "dora": {"r": 4, "use_dora": True, "target_modules": [*LINEARS, "lm_head"]},
}
BLENDS = {"two": {"all": 0.7, "rs": 0.5}, "weaker": {"all": 0.5}}
#: name -> its family, and pages that five requests of 70 tokens do not fit into
BASES = {
    "fp8": ("llama-biases", 20),
    "fp8-blocks": ("mistral-full", 20),
    "gptq": ("qwen2", 20),
    "awq": ("mistral-full", 20),
    "packed-zeros": ("qwen3", 20),
    "kv": ("qwen3", 9),
}
Made = tuple[FamilyOracle, dict[str, Any]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """An oracle over a base of BASES, and the settings of an engine that serves it."""

    @functools.cache
    def make(name: str) -> Made:
        folder = tmp_path_factory.mktemp("quantised")
        base = save_family(folder / "base", BASES[name][0])
        change: Callable[[Any], None] = fp8_bases.make_fp8
        config: dict[str, Any]
        if name == "fp8":
            config = {"base_precision": "fp8"}
        elif name == "kv":
            change, config = fp8_bases.keep_kv_in_fp8, {"kv_precision": "fp8", "page_size": 64}
        else:
            config = {"model_dir": folder / "stored"}
            if name in int4_bases.FORMATS:
                dense = int4_bases.save_checkpoint(base, folder / "stored", name)
                change = functools.partial(int4_bases.put_weights, dense=dense)
            else:
                matrices = fp8_bases.save_checkpoint(base, folder / "stored", name)
                change = functools.partial(fp8_bases.make_fp8, matrices=matrices)
        adapters = {
            adapter: save_adapter(base, folder / adapter, seed, **fields)
            for seed, (adapter, fields) in enumerate(ADAPTERS.items())
        }
        oracle = FamilyOracle(
            base, adapters, change, 1e-3 if name in int4_bases.FORMATS else TOLERANCE
        )
        for blend, weights in BLENDS.items():
            oracle.blend(blend, weights)
        return oracle, config

    return make


@pytest.mark.parametrize("name", BASES)
def test_adapters_and_blends_in_a_mixed_batch(make: Callable[[str], Made], name: str) -> None:
    oracle, config = make(name)
    names = [None, *ADAPTERS, *BLENDS]
    cases = [(adapter, 70 - 9 * i) for i, adapter in enumerate(names)]
    engine = make_engine(oracle, max_step_tokens=61, **config)
    check(engine, oracle, cases, num_tokens=6)
    assert check(engine, oracle, cases, num_tokens=6)["0"] == 64  # read from the prefix cache
    assert oracle.mean_error < MEAN_TOLERANCE
    engine.close()


@pytest.mark.parametrize("name", BASES)
def test_preemption(make: Callable[[str], Made], name: str) -> None:
    oracle, config = make(name)
    settings = EngineConfig(**{"model_dir": oracle.base, **config})
    page_bytes = settings.page_bytes(ModelConfig.from_folder(oracle.base))
    engine = make_engine(oracle, arena_bytes=BASES[name][1] * page_bytes, **config)
    cases: list[tuple[str | None, int]] = [(None, 10 + i) for i in range(5)]
    check(engine, oracle, cases, num_tokens=60)
    assert engine.stats().num_preemptions > 0
    assert oracle.mean_error < MEAN_TOLERANCE
    engine.close()


@pytest.mark.parametrize("name", BASES)
def test_drafts(make: Callable[[str], Made], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted, and half of them right: a random model repeats itself seldom."""
    pytest.importorskip("outlines")  # GPU machines have none
    from tests.engine.drafts.test_drafts import accepted, planted

    oracle, config = make(name)
    prompts = {adapter or "base": prompt(i, 20) for i, adapter in enumerate([None, *ADAPTERS])}
    requests = [
        request(i, tokens, adapter=None if i == "base" else i, max_tokens=16, logprobs=20)
        for i, tokens in prompts.items()
    ]
    engine = make_engine(oracle, **config)
    plain = run(engine, *requests)
    engine.close()
    monkeypatch.setattr("engine.drafts.speculation.propose", planted(plain))
    engine = make_engine(oracle, speculation=True, **config)
    found = run(engine, *requests, check=True)
    engine.close()
    assert accepted(found) > 16
    for i, tokens in prompts.items():
        oracle.check(found[i], tokens, None if i == "base" else i, 16)
