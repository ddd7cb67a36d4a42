"""Every form in which PEFT writes a LoRA that we take: our tokens are PEFT's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import AdapterMismatch, Engine, EngineConfig
from tests.engine.conftest import (
    LINEARS,
    Oracle,
    edit_config,
    prompt,
    request,
    run,
    save_adapter,
    save_model,
)
from tests.engine.model.families import save_family

peft = pytest.importorskip("peft")  # GPU machines have none

SLOTS = r"model\.layers\.\d+\.self_attn\.[qk]_proj"
# What PEFT's LoraConfig is made with.
FORMS: dict[str, dict[str, Any]] = {
    "targets-pattern": {"r": 4, "target_modules": r".*\.(q|v|down)_proj"},
    "targets-digits": {"r": 4, "target_modules": SLOTS},
    "targets-class": {"r": 4, "target_modules": r".*layers\.[1-9]\..*(up|o)_proj"},
    "targets-look-ahead": {"r": 4, "target_modules": r"(?!.*mlp)(?!.*layers\.0).*_proj"},
    "targets-head": {"r": 4, "target_modules": r"lm_head|.*embed.*|.*\.k_proj"},
    "all-linear": {"r": 4, "target_modules": "all-linear"},
    "excluded": {"r": 4, "target_modules": LINEARS, "exclude_modules": ["k_proj", "mlp.up_proj"]},
    "excluded-path": {
        "r": 4,
        "target_modules": LINEARS,
        "exclude_modules": ["model.layers.0.self_attn.q_proj"],
    },
    "excluded-pattern": {
        "r": 4,
        "target_modules": r".*_proj",
        "exclude_modules": r".*\.0\..*|.*v_proj",
    },
    "excluded-pattern-of-list": {
        "r": 4,
        "target_modules": LINEARS,
        "exclude_modules": r"model\.layers\.[^0]\.mlp\.\w+",
    },
    "rank-patterns": {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": LINEARS,
        "rank_pattern": {r".*\.0\..*q_proj": 2, r"layers\.\d+\.mlp.*": 3, "[qv]_proj": 7},
        "alpha_pattern": {r"\w+\.(k|o)_proj": 11, r".*mlp.*": 1, r"^model.*v_proj$": 3},
    },
    "rank-patterns-first-counts": {
        "r": 4,
        "target_modules": LINEARS,
        "rank_pattern": {".*_proj": 5, "q_proj": 2},
        "alpha_pattern": {"q_proj|v_proj": 20, "v_proj": 1},
    },
    "bias-all": {"r": 4, "target_modules": LINEARS, "bias": "all"},
    "bias-lora-only": {"r": 4, "target_modules": LINEARS, "bias": "lora_only"},
    "bias-lora-bias": {"r": 4, "target_modules": LINEARS, "bias": "all", "lora_bias": True},
    "minor-components": {"r": 4, "target_modules": ["o_proj"], "init_lora_weights": "mica"},
    "defaults": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
}


def without(source: Path, folder: Path, *fields: str) -> Path:
    """A copy of an adapter whose config leaves fields out."""
    edit_config(source, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    for field in fields:
        del config[field]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def in_dtype(source: Path, folder: Path, dtype: torch.dtype) -> Path:
    edit_config(source, folder)
    tensors = {n: t.to(dtype) for n, t in load_file(source / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def forms(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("forms")
    made = {
        name: save_adapter(tiny_model, folder / name, seed, **config)
        for seed, (name, config) in enumerate(FORMS.items())
    }
    made["all-linear-as-said"] = edit_config(
        made["all-linear"], folder / "said", target_modules="all-linear"
    )
    made["no-rank"] = without(made["defaults"], folder / "no-rank", "r")
    made["no-alpha"] = without(made["excluded"], folder / "no-alpha", "lora_alpha")
    made["neither"] = without(made["defaults"], folder / "neither", "r", "lora_alpha")
    made["neutral"] = edit_config(
        made["targets-head"],
        folder / "neutral",
        fan_in_fan_out=True,
        auto_mapping={"base_model_class": "X", "parent_library": "no.such", "unsloth_fixed": True},
        metadata={"of": "another tool"},
    )
    made["fp16"] = in_dtype(made["rank-patterns"], folder / "fp16", torch.float16)
    made["bf16"] = in_dtype(made["bias-lora-bias"], folder / "bf16", torch.bfloat16)
    return made


def test_tokens_are_pefts(tiny_model: Path, forms: dict[str, Path]) -> None:
    """All forms in one batch."""
    alone = {name for name in forms if "bias" in name or name == "bf16"}  # PEFT takes no two
    together = Oracle(tiny_model, {name: forms[name] for name in forms.keys() - alone})
    oracles = {name: Oracle(tiny_model, {name: forms[name]}) for name in alone}
    engine = Engine(EngineConfig(model_dir=tiny_model, arena_bytes=16 << 20))
    for name, path in forms.items():
        engine.register_adapter(name, path)
    cases = {name: prompt(i, 9 + i) for i, name in enumerate(forms)}
    results = run(
        engine, *(request(n, p, adapter=n, max_tokens=16) for n, p in cases.items()), check=True
    )
    engine.close()
    for name, tokens in cases.items():
        oracle = oracles.get(name, together)
        assert results[name].token_ids == oracle.generate(tokens, 16, name), name
        assert results[name].token_ids != oracle.generate(tokens, 16), name  # it does something


EMBEDDING_AND_HEAD = ["embed_tokens", "lm_head"]
# PEFT repeats the base's matrices, and what it saved, where tokens were added to the vocabulary.
REPEATING: dict[str, dict[str, Any]] = {
    "plain": {},
    "saved": {"modules_to_save": EMBEDDING_AND_HEAD},
    "saved-embedding": {"modules_to_save": ["embed_tokens"]},
    "saved-head": {"modules_to_save": ["lm_head"]},
    "saved-tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "saved-head-beside": {"r": 3, "target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [260, 3]},
    "tokens-tied": {"trainable_token_indices": [260, 3], "ensure_weight_tying": True},
    "tokens-apart": {"trainable_token_indices": {"embed_tokens": [260, 3], "lm_head": [261]}},
    "tokens-head": {"trainable_token_indices": {"lm_head": [260, 3]}},
    "tokens-lora-head": {
        "target_modules": ["q_proj", "lm_head"],
        "trainable_token_indices": [260, 3],
    },
    "lora-embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora-both": {"target_modules": ["q_proj", *EMBEDDING_AND_HEAD]},
    "lora-tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "lora-saved-head": {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_what_peft_repeats_of_a_changed_vocabulary_is_taken(tmp_path: Path, is_tied: bool) -> None:
    base = save_model(tmp_path / "base", vocab_size=264, tie_word_embeddings=is_tied)
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=16 << 20))
    names: set[str] = set()
    for seed, (kind, config) in enumerate(REPEATING.items()):
        config = {"r": 2, "target_modules": ["q_proj"], **config}
        adapter = save_adapter(base, tmp_path / kind, seed, repeats_ends=True, **config)
        names |= set(load_file(adapter / "adapter_model.safetensors"))
        engine.register_adapter(kind, adapter)
        tokens = [*prompt(seed, 9), 260, 3, 261]
        found = run(engine, request("a", tokens, adapter=kind, max_tokens=1, logprobs=20))["a"]
        assert found.error is None, kind
        wanted = Oracle(base, {"a": adapter}).logprobs(tokens, "a")[-1]
        for token_id, logprob in found.logprobs[0].top:
            assert wanted[token_id].item() == pytest.approx(logprob, abs=1e-4), kind
    engine.close()
    for end in ("original_module", "modules_to_save", "token_adapter.base_layer"):
        assert f"base_model.model.lm_head.{end}.weight" in names


def test_a_repeated_matrix_that_is_not_the_bases_is_refused(tmp_path: Path) -> None:
    """PEFT would compute with it; what it repeats of its own is not read, by PEFT either."""
    base = save_model(tmp_path / "base", vocab_size=264, tie_word_embeddings=True)
    config = {"r": 2, "target_modules": ["q_proj"]}
    kinds = {
        "saved": ("modules_to_save", "original_module.weight", "modules_to_save.weight"),
        "tokens": ("trainable_token_indices", "lm_head.token_adapter.base_layer.weight", None),
        "twin": ("trainable_token_indices", "lm_head.token_adapter.trainable_tokens_delta", None),
    }
    engine = Engine(EngineConfig(model_dir=base, arena_bytes=16 << 20))
    for kind, (field, bad, unread) in kinds.items():
        value = EMBEDDING_AND_HEAD if kind == "saved" else [260, 3]
        made = save_adapter(base, tmp_path / kind, repeats_ends=True, **config, **{field: value})
        for changed in filter(None, (bad, unread)):
            folder = edit_config(made, tmp_path / f"{kind}-{changed}")
            tensors = load_file(made / "adapter_model.safetensors")
            for name in [name for name in tensors if name.endswith(changed)]:
                tensors[name] = tensors[name] + 1
            save_file(tensors, folder / "adapter_model.safetensors")
            engine.register_adapter(changed, folder)
            found = run(engine, request("a", prompt(1, 9), adapter=changed, max_tokens=2))["a"]
            if changed == unread:
                assert found.token_ids == Oracle(base, {"a": folder}).generate(prompt(1, 9), 2, "a")
            else:
                assert isinstance(found.error, AdapterMismatch) and bad in found.error.message
    engine.close()


P = "base_model.model."
# How a tensor's name is changed, and whether PEFT still reads it.
NAMES: dict[str, tuple[str, str, bool]] = {
    "as saved": ("", "", True),
    "magnitudes with weight": ("magnitude_vector", "magnitude_vector.weight", True),
    "magnitudes with both": ("magnitude_vector", "magnitude_vector.default.weight", True),
    "magnitudes with default": ("magnitude_vector", "magnitude_vector.default", False),
    "matrices with default": (".weight", ".default.weight", True),
    "embeddings with default": ("embedding_A", "embedding_A.default", True),
    "another adapter's": ("lora_A.weight", "lora_A.mine.weight", False),
    "no prefix": (P, "", False),
    "the prefix twice": (P, P * 2, False),
    "half a prefix": (P, "base_model.", False),
    "no inner model": (f"{P}model.", P, False),
}


def test_names_are_read_as_by_peft(tiny_model: Path, tmp_path: Path) -> None:
    config = {"r": 2, "use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}
    made = save_adapter(tiny_model, tmp_path / "made", repeats_ends=False, **config)
    tensors = load_file(made / "adapter_model.safetensors")
    expected = Oracle(tiny_model, {"a": made}).logprobs(prompt(1, 9), "a")
    engine = Engine(EngineConfig(model_dir=tiny_model, arena_bytes=4 << 20))
    for kind, (old, new, is_read) in NAMES.items():
        folder = edit_config(made, tmp_path / kind)
        renamed = {name.replace(old, new) if old else name: t for name, t in tensors.items()}
        save_file(renamed, folder / "adapter_model.safetensors")
        by_peft = Oracle(tiny_model, {"default": folder}).logprobs(prompt(1, 9), "default")
        assert torch.equal(by_peft, expected) == is_read, kind
        if is_read:
            engine.register_adapter(kind, folder)
        else:
            with pytest.raises(
                AdapterMismatch, match=r"rename it to base_model\.model|leave it out"
            ):
                engine.register_adapter(kind, folder)
    engine.close()


def test_the_defaults_are_pefts() -> None:
    from contract.adapters.peft_config import DEFAULT_ALPHA, DEFAULT_RANK

    config = peft.LoraConfig()
    assert (config.r, config.lora_alpha) == (DEFAULT_RANK, DEFAULT_ALPHA)


@pytest.mark.parametrize("base", ["llama-biases", "qwen2"])
@pytest.mark.parametrize("mode", ["all", "lora_only"])
def test_trained_biases_of_the_base_are_refused(tmp_path: Path, base: str, mode: str) -> None:
    model = save_family(tmp_path / "base", base)
    adapter = save_adapter(model, tmp_path / "a", r=4, target_modules=LINEARS, bias=mode)
    engine = Engine(EngineConfig(model_dir=model, arena_bytes=4 << 20))
    try:
        with pytest.raises(AdapterMismatch) as raised:
            engine.register_adapter("a", adapter)
    finally:
        engine.close()
    assert "bias" in (raised.value.param or "")


def test_lora_only_beside_biases_of_others_changes_nothing(tmp_path: Path) -> None:
    """Qwen2 has biases on q, k and v alone."""
    model = save_family(tmp_path / "base", "qwen2")
    config = {"r": 4, "target_modules": ["o_proj", "up_proj"], "bias": "lora_only"}
    adapter = save_adapter(model, tmp_path / "a", **config)
    oracle = Oracle(model, {"a": adapter})
    engine = Engine(EngineConfig(model_dir=model, arena_bytes=4 << 20))
    engine.register_adapter("a", adapter)
    got = run(engine, request("a", prompt(1, 20), adapter="a", max_tokens=12))["a"].token_ids
    engine.close()
    assert got == oracle.generate(prompt(1, 20), 12, "a")


def converted(base: Path, folder: Path, init: str) -> Path:
    """An adapter of another initialisation, trained a little, that PEFT saved as a plain LoRA."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=5,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=init,
        corda_config=CordaConfig(corda_method="kpm") if init == "corda" else None,
    )
    if init == "corda":
        tokens = torch.tensor([prompt(5, 200)])
        preprocess_corda(model, config, run_model=lambda: model(tokens))
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(folder / "initial")
    adapted.peft_config["default"].init_lora_weights = init
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(
        folder / "plain", path_initial_model_for_weight_conversion=str(folder / "initial")
    )
    return folder / "plain"


@pytest.mark.parametrize("init", ["corda", "pissa", "olora"])
def test_converted_adapters_are_plain(tiny_model: Path, tmp_path: Path, init: str) -> None:
    adapter = converted(tiny_model, tmp_path, init)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["corda_config"] is not None) == (init == "corda")
    oracle = Oracle(tiny_model, {"a": adapter})
    engine = Engine(EngineConfig(model_dir=tiny_model, arena_bytes=4 << 20))
    engine.register_adapter("a", adapter)
    got = run(engine, request("a", prompt(1, 20), adapter="a", max_tokens=12))["a"].token_ids
    engine.close()
    assert got == oracle.generate(prompt(1, 20), 12, "a")


def test_a_pickle_is_refused_with_the_way_out(
    tiny_model: Path, forms: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two lines of the message make the file that is taken."""
    folder = edit_config(forms["defaults"], tmp_path / "a")
    tensors = folder / "adapter_model.safetensors"
    torch.save(load_file(tensors), folder / "adapter_model.bin")
    tensors.unlink()
    engine = Engine(EngineConfig(model_dir=tiny_model, arena_bytes=4 << 20))
    with pytest.raises(AdapterMismatch, match=r"adapter_model\.bin") as raised:
        engine.register_adapter("a", folder)
    monkeypatch.chdir(folder)
    exec(raised.value.message.partition("trust it: ")[2], {})
    engine.register_adapter("a", folder)
    assert run(engine, request("a", prompt(1, 20), adapter="a", max_tokens=3))["a"].token_ids
    engine.close()
    shutil.rmtree(folder)
