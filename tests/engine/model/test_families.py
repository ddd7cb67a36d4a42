"""Every family and way to scale RoPE: in fp32, tokens and log-probabilities are Hugging Face's.

The oracle reads what the engine generated in one pass without a cache: each token must be the one
that Hugging Face finds most likely after all before it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig
from engine.adapters.plan import plan_adapter
from engine.errors import AdapterMismatch
from engine.model.config import ModelConfig
from engine.model.hf_weights import share_model
from tests.engine.conftest import (
    LINEARS,
    SMALL,
    Result,
    load_base,
    prompt,
    request,
    run,
    save_adapter,
)
from tests.engine.model.families import (
    FAMILIES,
    ORIGINAL,
    WITH_IMAGES,
    save_family,
    save_with_images,
    targets,
)

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 8, "target_modules": LINEARS},
    "kv": {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["k_proj", "v_proj"]},
    "dora": {
        "r": 4,
        "use_dora": True,
        "target_modules": [*LINEARS, "embed_tokens", "lm_head"],
        "rank_pattern": {"lm_head": 2},
    },
    "biases": {"r": 2, "lora_bias": True, "target_modules": [*LINEARS, "lm_head"]},
}
# (adapter, prompt length): prompts within and far beyond every window and the original context
CASES = [
    (None, 100),
    ("all", 70),
    (None, 5),
    ("kv", ORIGINAL + 1),
    ("all", 1),
    ("dora", 40),
    ("biases", 9),
]
NUM_TOKENS = 10
#: Sizes that groups and blocks of 128 divide.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


class FamilyOracle:
    """A base with its adapters, by Hugging Face and PEFT.

    change     what to do to Hugging Face's model before adapters are put on it
    tolerance  of log-probabilities; within it, another token may be the likeliest
    """

    def __init__(
        self,
        base: Path,
        adapters: dict[str, Path],
        change: Callable[[Any], None] | None = None,
        tolerance: float = 1e-3,
    ) -> None:
        self.base, self.adapters, self.tolerance = base, adapters, tolerance
        self.mean_error = 0.0
        names = list(adapters)
        model = load_base(base)
        if change is not None:
            change(model)
        self._model = PeftModel.from_pretrained(model, adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            self._model.load_adapter(adapters[name], adapter_name=name)
        self.blends: dict[str | None, dict[str, float]] = {}

    def blend(self, name: str, weights: dict[str, float]) -> None:
        """Define an adapter as PEFT's exact weighted sum."""
        self._model.add_weighted_adapter(
            list(weights), list(weights.values()), name, combination_type="cat"
        )
        self.blends[name] = weights

    def logprobs(self, token_ids: list[int], adapter: str | None) -> torch.Tensor:
        """[tokens, V]: of the token after each."""
        with torch.no_grad():
            if adapter is None:
                with self._model.disable_adapter():
                    logits = self._model(torch.tensor([token_ids])).logits
            else:
                self._model.set_adapter(adapter)
                logits = self._model(torch.tensor([token_ids])).logits
        return logits[0].log_softmax(-1)

    def check(
        self, result: Result, tokens: list[int], adapter: str | None, num_tokens: int
    ) -> None:
        """Greedy, and as likely as the engine says."""
        assert result.error is None
        assert len(result.token_ids) == num_tokens
        wanted = self.logprobs(tokens + result.token_ids, adapter)[len(tokens) - 1 : -1]
        near, errors = self.tolerance, []
        for row, got in zip(wanted, result.logprobs, strict=True):
            assert got.token_id == row.argmax() or row[got.token_id] > row.max() - near
            assert row[got.token_id].item() == pytest.approx(got.logprob, abs=near)
            assert len(got.top) == 20
            for token_id, logprob in got.top:
                assert row[token_id].item() == pytest.approx(logprob, abs=near)
                errors.append(abs(row[token_id].item() - logprob))
        self.mean_error = max(self.mean_error, sum(errors) / len(errors))


MakeOracle = Callable[[str], FamilyOracle]


def save_adapters(base: Path, folder: Path) -> dict[str, Path]:
    """Save each of ADAPTERS for a base, whose linears may have other names than Llama's."""
    return {
        name: save_adapter(
            base,
            folder / name,
            seed,
            **{**config, "target_modules": targets(base, config["target_modules"])},
        )
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def make_oracle(tmp_path_factory: pytest.TempPathFactory) -> MakeOracle:
    made: dict[str, FamilyOracle] = {}

    def make(name: str) -> FamilyOracle:
        if name not in made:
            base = save_family(tmp_path_factory.mktemp("family"), name)
            adapters = save_adapters(base, tmp_path_factory.mktemp("adapters"))
            made[name] = FamilyOracle(base, adapters)
        return made[name]

    return make


def make_engine(oracle: FamilyOracle, **config: Any) -> Engine:
    engine = Engine(EngineConfig(**{"model_dir": oracle.base, **SMALL, **config}))
    for name, path in oracle.adapters.items():
        engine.register_adapter(name, path)
    return engine


def check(
    engine: Engine,
    oracle: FamilyOracle,
    cases: list[tuple[str | None, int]] = CASES,
    num_tokens: int = NUM_TOKENS,
) -> dict[str, int]:
    """Run (adapter, prompt length) of `cases` in one batch; the cached tokens of each."""
    prompts = {str(i): (adapter, prompt(i, n)) for i, (adapter, n) in enumerate(cases)}
    results = run(
        engine,
        *(
            request(
                i,
                tokens,
                adapter=oracle.blends.get(adapter, adapter),
                max_tokens=num_tokens,
                logprobs=20,
            )
            for i, (adapter, tokens) in prompts.items()
        ),
        check=True,
    )
    for i, (adapter, tokens) in prompts.items():
        oracle.check(results[i], tokens, adapter, num_tokens)
    return {i: result.last.num_cached_tokens for i, result in results.items() if result.last}


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_batch_whole_chunked_and_cached(make_oracle: MakeOracle, name: str) -> None:
    oracle = make_oracle(name)
    for max_step_tokens in (512, 19):
        engine = make_engine(oracle, max_step_tokens=max_step_tokens)
        assert set(check(engine, oracle).values()) == {0}
        assert check(engine, oracle)["0"] == 96
        engine.close()


@pytest.mark.parametrize("name", ["phi3", "glm4"])
def test_adapters_may_name_fused_linears_apart(
    make_oracle: MakeOracle, name: str, tmp_path: Path
) -> None:
    """As adapters of checkpoints that were rewritten for Llama's modules do."""
    oracle, apart = make_oracle(name), tmp_path / "apart"
    apart.mkdir()
    model = ModelConfig.from_folder(oracle.base)
    heights = {
        "qkv_proj": {"q_proj": model.q_size, "k_proj": model.kv_size, "v_proj": model.kv_size},
        "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), model.intermediate_size),
    }
    split: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(oracle.adapters["all"] / "adapter_model.safetensors").items():
        fused = next((fused for fused in heights if fused in key), None)
        parts = heights.get(fused or "", {"": len(tensor)})
        rows = tensor.split(list(parts.values())) if "lora_B" in key else [tensor] * len(parts)
        for part, own in zip(parts, rows, strict=True):
            split[key.replace(fused, part) if fused else key] = own.clone()
    save_file(split, apart / "adapter_model.safetensors")
    config = json.loads((oracle.adapters["all"] / "adapter_config.json").read_text())
    config["target_modules"] = LINEARS
    (apart / "adapter_config.json").write_text(json.dumps(config))
    engine = make_engine(oracle)
    engine.register_adapter("apart", apart)
    tokens = prompt(1, 30)
    got = run(engine, request("r", tokens, adapter="apart", max_tokens=8, logprobs=20))["r"]
    engine.close()
    oracle.check(got, tokens, "all", 8)
    del split[next(name for name in split if "up_proj.lora_A" in name)]
    shapes = {key: tuple(tensor.shape) for key, tensor in split.items()}
    with pytest.raises(AdapterMismatch, match=r"up_proj\.lora_A"):
        plan_adapter(config, shapes, model)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_text_of_a_model_with_images(tmp_path: Path, name: str) -> None:
    """Its adapters are named as either version of transformers names them; PEFT has a pattern."""
    base = save_with_images(tmp_path / "base", name)
    pattern = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
    new = save_adapter(base, tmp_path / "new", 1, r=4, lora_alpha=8, target_modules=pattern)
    oracle = FamilyOracle(base, {"new": new})
    engine, old, seeing = make_engine(oracle), tmp_path / "old", tmp_path / "seeing"
    tensors = load_file(new / "adapter_model.safetensors")
    assert all(".model.language_model.layers." in key for key in tensors)
    config = (new / "adapter_config.json").read_text()
    for folder in (old, seeing):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(config)
    renamed = {
        k.replace("model.language_model.", "language_model.model."): t.clone()
        for k, t in tensors.items()
    }
    save_file(renamed, old / "adapter_model.safetensors")
    engine.register_adapter("old", old)
    for adapter in (None, "new", "old"):
        tokens = prompt(3, 40)
        got = run(engine, request("r", tokens, adapter=adapter, max_tokens=6, logprobs=20))["r"]
        oracle.check(got, tokens, adapter and "new", 6)
    vision = "base_model.model.model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, vision: torch.ones(4, 16)}, seeing / "adapter_model.safetensors")
    with pytest.raises(AdapterMismatch, match="vision_tower"):
        engine.register_adapter("seeing", seeing)
    engine.close()
    model = load_base(base)
    assert share_model(model).config == ModelConfig.from_folder(base)


def test_qwens_text_model_may_have_the_names_of_the_one_with_images(
    make_oracle: MakeOracle, tmp_path: Path
) -> None:
    """As transformers reads them; the head that guesses further tokens is not read."""
    oracle, base, own = make_oracle("qwen3_5"), tmp_path / "base", tmp_path / "own"
    shutil.copytree(oracle.base, base)
    shutil.copytree(oracle.adapters["all"], own)

    def rename(file: Path, *more: str) -> None:
        tensors = load_file(file)
        named = {
            k.replace("model.layers", "model.language_model.layers"): t for k, t in tensors.items()
        }
        save_file({**named, **{name: torch.ones(3) for name in more}}, file)

    rename(base / "model.safetensors", "mtp.fc.weight", "model.visual.patch_embed.proj.bias")
    rename(own / "adapter_model.safetensors")
    assert any(
        ".language_model.layers.0.linear_attn.in_proj_z." in k
        for k in load_file(own / "adapter_model.safetensors")
    )
    engine = make_engine(oracle, model_dir=base)
    engine.register_adapter("own", own)
    for adapter in (None, "own"):
        tokens = prompt(4, 30)
        got = run(engine, request("r", tokens, adapter=adapter, max_tokens=6, logprobs=20))["r"]
        oracle.check(got, tokens, adapter and "all", 6)
    engine.close()


# Where every layer has a window, requests hold less.
@pytest.mark.parametrize(
    ("name", "num_pages"),
    [("mistral", 15), ("qwen2-sliding", 22), ("qwen3-yarn", 22), ("qwen3_5", 48)],
)
def test_preemption(make_oracle: MakeOracle, name: str, num_pages: int) -> None:
    oracle = make_oracle(name)
    config = EngineConfig(model_dir=oracle.base)
    page_bytes = config.page_bytes(ModelConfig.from_folder(oracle.base))
    engine = make_engine(oracle, arena_bytes=num_pages * page_bytes, max_step_tokens=64)
    # Adapters that arrive late, on a busy machine, would find pages that others gave back.
    check(engine, oracle, [("all", 4), ("kv", 4)], num_tokens=1)
    cases = [(adapter, 10 + i) for i, adapter in enumerate([None, "all", "kv", None, "all"])]
    check(engine, oracle, cases, num_tokens=50)
    assert engine.stats().num_preemptions > 0
    engine.close()
