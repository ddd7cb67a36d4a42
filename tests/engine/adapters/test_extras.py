"""DoRA, biases, adapters of the embedding and of the head: alone, in blends, and come again.

That they equal PEFT in mixed batches of every kind is in test_oracle.py and test_families.py,
whose adapters include them.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import AdapterMismatch, Engine, EngineConfig
from engine.errors import AdapterError
from tests.engine.adapters.peft_reference import Reference
from tests.engine.conftest import (
    MakeEngine,
    Oracle,
    Result,
    prompt,
    request,
    run,
    save_adapter,
    save_model,
)

EXTENDED = ("dora", "dora-some", "bias", "bias-head", "ends", "embedding", "dora-embedding")
TENSORS = "adapter_model.safetensors"
BLENDS: dict[str, dict[str, float]] = {
    "two doras": {"dora": 0.6, "dora-some": 0.5},
    "dora and plain": {"all-4": -0.4, "dora": 1.2, "patterns": 0.5},
    "biases": {"bias": 0.5, "bias-head": 2.0},
    "ends": {"ends": 0.7, "embedding": 0.4, "dora-embedding": 0.8, "bias-head": 0.3},
    "one": {"dora-some": 0.3},
}


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


def check(
    result: Result, tokens: list[int], reference: Reference, blend: dict[Path, float]
) -> None:
    """Greedy by the reference, and as likely as the engine says."""
    assert result.error is None
    logits = reference.logits(tokens + result.token_ids, blend)[len(tokens) - 1 : -1]
    assert result.token_ids == logits.argmax(-1).tolist()
    logprobs = logits.log_softmax(-1)
    for row, got in zip(logprobs, result.logprobs, strict=True):
        for token_id, logprob in got.top:
            assert row[token_id].item() == pytest.approx(logprob, abs=1e-3)


@pytest.mark.parametrize("max_step_tokens", [512, 9], ids=["whole", "chunked"])
def test_blends_are_weighted_sums(
    make_engine: MakeEngine,
    adapters: dict[str, Path],
    reference: Reference,
    max_step_tokens: int,
) -> None:
    """All blends, each adapter alone and the base in one batch."""
    blends = {**BLENDS, **{name: {name: 1.0} for name in EXTENDED}, "base": {}}
    prompts = {name: prompt(i, 6 + i) for i, name in enumerate(blends)}
    engine = make_engine(max_step_tokens=max_step_tokens, arena_bytes=8 << 20)
    results = run(
        engine,
        *(
            request(name, prompts[name], adapter=blend, max_tokens=8, logprobs=20)
            for name, blend in blends.items()
        ),
        check=True,
    )
    for name, blend in blends.items():
        paths = {adapters[part]: weight for part, weight in blend.items()}
        check(results[name], prompts[name], reference, paths)


def test_the_reference_is_peft(reference: Reference, adapters: dict[str, Path]) -> None:
    """In which blends then only differ by the sum."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    base = reference._model.name_or_path
    for name in EXTENDED:
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        adapted = PeftModel.from_pretrained(model, adapters[name])
        with torch.no_grad():
            wanted = adapted(torch.tensor([prompt(1, 20)])).logits[0]
        assert torch.allclose(
            reference.logits(prompt(1, 20), {adapters[name]: 1.0}), wanted, atol=1e-3
        )


def test_eviction_and_return(make_engine: MakeEngine, oracle: Oracle) -> None:
    """The arena holds the largest and little more; without host memory each is read again."""
    engine = make_engine(arena_bytes=64 * 2048 * 4, max_running=2, host_cache_bytes=0)
    for _ in range(2):
        for adapter in ("all-64", *EXTENDED):
            got = run(engine, request("r", prompt(1, 9), adapter=adapter, max_tokens=6))["r"]
            assert got.token_ids == oracle.generate(prompt(1, 9), 6, adapter)


@pytest.mark.parametrize("adapter", ["dora", "ends"])
def test_prefix_hits(make_engine: MakeEngine, oracle: Oracle, adapter: str) -> None:
    engine = make_engine()
    for cached in (0, 32):
        got = run(engine, request("r", prompt(4, 40), adapter=adapter, max_tokens=6))["r"]
        assert got.token_ids == oracle.generate(prompt(4, 40), 6, adapter)
        assert got.last is not None and got.last.num_cached_tokens == cached


@pytest.mark.parametrize(
    "config",
    [
        {"r": 4, "target_modules": ["lm_head"], "ensure_weight_tying": True},
        {"r": 4, "target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
        {
            "r": 3,
            "lora_alpha": 7,
            "target_modules": ["embed_tokens"],
            "ensure_weight_tying": True,
            "use_dora": True,
        },
        {"r": 4, "target_modules": ["embed_tokens", "lm_head"]},
        {"r": 4, "target_modules": ["lm_head"], "use_dora": True},
    ],
    ids=["tied-head", "tied-embedding", "tied-dora", "apart", "head-alone"],
)
def test_tied_embeddings(tmp_path: Path, config: dict[str, Any]) -> None:
    base = save_model(tmp_path / "base", seed=3, tie_word_embeddings=True)
    adapter = save_adapter(base, tmp_path / "a", **config)
    oracle = Oracle(base, {"a": adapter})
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=4 << 20))
    engine.register_adapter("a", adapter)
    results = run(
        engine,
        request("base", prompt(0, 11), max_tokens=10),
        request("a", prompt(1, 11), adapter="a", max_tokens=10),
    )
    engine.close()
    assert results["base"].token_ids == oracle.generate(prompt(0, 11), 10)
    assert results["a"].token_ids == oracle.generate(prompt(1, 11), 10, "a")


def edited(source: Path, folder: Path, **tensors: Any) -> Path:
    """A copy of an adapter; tensors whose name ends so are made by a function of theirs."""
    shutil.copytree(source, folder)
    content = load_file(folder / TENSORS)
    for name in list(content):
        for end, change in tensors.items():
            if name.endswith(end.replace("__", ".")):
                content[name] = change(content[name]).contiguous()
    save_file(content, folder / TENSORS)
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_of_the_base_may_be_rounded(
    make_engine: MakeEngine, adapters: dict[str, Path], oracle: Oracle, tmp_path: Path, dtype: Any
) -> None:
    folder = edited(adapters["ends"], tmp_path / "a", base_layer__weight=lambda t: t.to(dtype))
    engine = make_engine()
    engine.register_adapter("rounded", folder)
    got = run(engine, request("r", prompt(2, 9), adapter="rounded", max_tokens=6))["r"]
    assert got.token_ids == oracle.generate(prompt(2, 9), 6, "ends")


def test_a_copy_that_is_no_rounding_of_the_bases_is_refused(
    make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """PEFT would use the file's: one unit in the last place of bfloat16 gave other tokens."""

    def trained(tensor: torch.Tensor) -> torch.Tensor:
        rounded = tensor.to(torch.bfloat16)
        rounded.view(torch.int16)[5, 5] += 1
        return rounded

    folder = edited(adapters["ends"], tmp_path / "a", lm_head__base_layer__weight=trained)
    engine = make_engine()
    engine.register_adapter("trained", folder)
    error = run(engine, request("r", prompt(2, 9), adapter="trained"))["r"].error
    assert isinstance(error, AdapterMismatch) and "modules_to_save" in error.message


def with_bits(change: int) -> Any:
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[change, change] *= 1.001
        return tensor

    return changed


BAD_VALUES: dict[str, tuple[str, dict[str, Any], str]] = {
    "trained embedding": ("ends", {"embed_tokens__base_layer__weight": with_bits(5)}, "base_layer"),
    "trained head": ("bias-head", {"lm_head__base_layer__weight": with_bits(7)}, "lm_head"),
    "bias not finite": (
        "bias",
        {"down_proj__lora_B__bias": lambda t: t * float("inf")},
        "lora_B.bias",
    ),
    "embedding not finite": ("ends", {"lora_embedding_A": lambda t: t / 0}, "lora_embedding_A"),
    "magnitude not finite": ("dora", {"magnitude_vector": lambda t: t * float("nan")}, "magnitude"),
}


@pytest.mark.parametrize(("adapter", "change", "named"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_values_end_their_own_requests_by_name(
    make_engine: MakeEngine,
    adapters: dict[str, Path],
    tmp_path: Path,
    adapter: str,
    change: dict[str, Any],
    named: str,
) -> None:
    engine = make_engine()
    engine.register_adapter("bad", edited(adapters[adapter], tmp_path / "bad", **change))
    results = run(
        engine,
        request("bad", prompt(0, 5), adapter="bad", max_tokens=4),
        request("good", prompt(0, 5), adapter=adapter, max_tokens=4),
        check=True,
    )
    error = results["bad"].error
    assert isinstance(error, AdapterMismatch)
    assert error.param is not None and named in error.param
    assert named in error.message
    assert len(results["good"].token_ids) == 4


@pytest.mark.parametrize("adapter", ["dora", "ends", "bias-head"])
def test_a_damaged_file_is_an_adapters_own_error(
    make_engine: MakeEngine, adapters: dict[str, Path], tmp_path: Path, adapter: str
) -> None:
    """Bytes of the config and of the tensors' header changed, cut out and doubled at random."""
    engine = make_engine()
    chance = random.Random(adapter)
    num_refused = 0
    for i in range(60):
        folder = tmp_path / str(i)
        shutil.copytree(adapters[adapter], folder)
        file = folder / chance.choice([TENSORS, "adapter_config.json"])
        content = bytearray(file.read_bytes())
        header = int.from_bytes(content[:8], "little") if file.name == TENSORS else len(content)
        at = chance.randrange(min(len(content), header + 16))
        match i % 3:
            case 0:
                content[at] ^= 1 << chance.randrange(8)
            case 1:
                del content[at : at + chance.randrange(1, 40)]
            case 2:
                content[at:at] = content[at : at + chance.randrange(1, 40)]
        file.write_bytes(content)
        try:
            engine.register_adapter(f"bad{i}", folder)
        except AdapterError as error:
            num_refused += 1
            assert str(error)
            continue
        error = run(engine, request("r", prompt(0, 4), adapter=f"bad{i}", max_tokens=1))["r"].error
        assert error is None or isinstance(error, AdapterError)
        engine.unregister_adapter(f"bad{i}")
    assert num_refused > 30
    engine.check_integrity()


def test_a_row_that_dora_cannot_scale_is_refused(
    make_engine: MakeEngine, adapters: dict[str, Path], tiny_model: Path, tmp_path: Path
) -> None:
    """W + s B A is zero in one row, so its norm divides nothing."""
    weight = load_file(tiny_model / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]

    def cancel(folder: Path) -> None:
        content = load_file(folder / TENSORS)
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        content[f"{module}.lora_A.weight"][0] = weight[3]
        row = torch.zeros_like(content[f"{module}.lora_B.weight"][3])
        row[0] = -1.0
        content[f"{module}.lora_B.weight"][3] = row
        save_file(content, folder / TENSORS)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["lora_alpha"] = config["r"]
        (folder / "adapter_config.json").write_text(json.dumps(config))

    folder = edited(adapters["dora"], tmp_path / "bad")
    cancel(folder)
    engine = make_engine()
    engine.register_adapter("bad", folder)
    error = run(engine, request("r", prompt(0, 5), adapter="bad"))["r"].error
    assert isinstance(error, AdapterMismatch)
    assert error.param is not None and error.param.endswith("q_proj.lora_magnitude_vector")


def test_a_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", tie_word_embeddings=True)
    config = {"r": 4, "target_modules": ["lm_head"], "ensure_weight_tying": True}
    good = save_adapter(base, tmp_path / "good", **config)
    bad = edited(good, tmp_path / "bad", lm_head__lora_A__weight=with_bits(1))
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=4 << 20))
    engine.register_adapter("bad", bad)
    error = run(engine, request("r", prompt(0, 5), adapter="bad"))["r"].error
    engine.close()
    assert isinstance(error, AdapterMismatch) and error.param == "ensure_weight_tying"
