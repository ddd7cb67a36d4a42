"""Runs that are trained together become what each becomes alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.training.run import RunSettings
from tests.engine.model.families import save_family, targets
from tests.engine.training.scenes import (
    difference,
    eight_runs,
    load,
    make_trainer,
    peft_train,
    request,
    train,
)

#: The largest difference of a value of an adapter: sums of the base's products in another order.
FLOAT32_BOUND = 2e-5
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
TRAINED = (
    "llama", "qwen2", "qwen3", "qwen2-sliding", "smollm3", "granite", "olmo2", "gemma3", "seed_oss",
    "ministral3", "exaone4", "olmo3", "cohere2", "qwen3_5", "qwen3_moe",
    "qwen3_5_moe", "gpt_oss", "gemma4", "gemma4-one",
)  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, FLOAT32_BOUND)]
)
def test_eight_runs_together_give_the_adapters_of_each_alone(
    tiny: Path, dtype: torch.dtype, bound: float
) -> None:
    model = load(tiny, dtype)
    together = train(make_trainer(model), eight_runs())
    for asked in eight_runs():
        alone = train(make_trainer(model), [asked])[asked.run_id]
        shared = together[asked.run_id]
        assert len(shared.losses) == asked.settings.steps
        assert shared.losses == pytest.approx(alone.losses, abs=bound)
        assert difference(alone.adapter, shared.adapter) < bound


#: Factors of the bounds. A chunk's sums have another order in transformers; large rates of learning
#: multiply the difference from step to step.
LOOSER = {"qwen3_5": 20, "qwen3_5_moe": 20}


@pytest.mark.parametrize("family", TRAINED)
def test_each_run_is_the_one_that_peft_and_the_trainer_make(family: str, tmp_path: Path) -> None:
    folder, runs = save_family(tmp_path / family, family), eight_runs()
    for i, asked in enumerate(runs):
        names = tuple(targets(folder, list(asked.settings.target_modules))) or ("v_proj",)
        runs[i] = replace(asked, settings=replace(asked.settings, target_modules=names))
    together = train(make_trainer(load(folder)), runs)
    for asked in runs:
        peft, ours = peft_train(folder, asked, tmp_path / "out"), together[asked.run_id]
        factor = LOOSER.get(family, 1)
        assert ours.losses == pytest.approx(peft.losses, abs=FLOAT32_BOUND * factor)
        rates = [each.learning_rate for each in ours.progress]
        assert rates == pytest.approx(peft.rates, rel=1e-9, abs=0)
        norms = [each.grad_norm for each in ours.progress]
        assert norms == pytest.approx(peft.norms, rel=1e-3)
        # A single value of which the gradient is zero but for rounding may move either way.
        for tensor, wanted in peft.adapter.items():
            assert float((ours.adapter[tensor] - wanted).abs().mean()) < 1e-6 * factor


def test_layers_that_share_keys_may_be_computed_again(tmp_path: Path) -> None:
    folder, asked = save_family(tmp_path / "gemma4", "gemma4"), eight_runs()[:1]
    kept, again = (train(make_trainer(load(folder, recomputed=n)), asked) for n in (0, 4))
    for name, result in kept.items():
        assert difference(result.adapter, again[name].adapter) < FLOAT32_BOUND


def test_a_base_with_fused_linears_trains_as_one_with_the_same_weights_apart(
    tmp_path: Path,
) -> None:
    """PEFT has no modules of these names in a Phi-3; its weights are also those of a Llama."""
    fused = save_family(tmp_path / "phi3", "phi3", sliding_window=None, rope_parameters=None)
    config = json.loads((fused / "config.json").read_text())
    tensors = load_file(fused / "model.safetensors")
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "qkv_proj" in name:
            parts = zip("qkv", tensor.split([64, 32, 32]), strict=True)
            apart |= {name.replace("qkv_proj", f"{n}_proj"): part.clone() for n, part in parts}
        elif "gate_up_proj" in name:
            parts = zip(("gate", "up"), tensor.chunk(2), strict=True)
            apart |= {name.replace("gate_up", n): part.clone() for n, part in parts}
        else:
            apart[name] = tensor
    folder = tmp_path / "llama"
    folder.mkdir()
    known = (
        "rms_norm_eps", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
    )  # fmt: skip
    fields = {"model_type": "llama", **{name: config[name] for name in known}}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(apart, folder / "model.safetensors")
    ours, theirs = (train(make_trainer(load(base)), eight_runs()[:2]) for base in (fused, folder))
    for name, result in ours.items():
        assert result.progress == theirs[name].progress
        assert difference(result.adapter, theirs[name].adapter) == 0


def test_the_attention_of_glm4_trains_as_with_peft(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "glm4", "glm4")
    asked = request("run", RunSettings(rank=4, steps=4, batch_size=2, target_modules=ATTENTION))
    [ours], peft = (
        train(make_trainer(load(folder)), [asked]).values(),
        peft_train(folder, asked, tmp_path / "out"),
    )
    assert ours.losses == pytest.approx(peft.losses, abs=FLOAT32_BOUND)
    for tensor, wanted in peft.adapter.items():
        assert float((ours.adapter[tensor] - wanted).abs().mean()) < 1e-6


def test_with_one_run_a_pass_the_company_changes_no_bit(tiny: Path) -> None:
    model = load(tiny)
    together = train(make_trainer(model, runs_a_pass=1), eight_runs())
    for asked in reversed(eight_runs()):
        alone = train(make_trainer(model, runs_a_pass=1), [asked])[asked.run_id]
        assert together[asked.run_id].progress == alone.progress
        assert difference(together[asked.run_id].adapter, alone.adapter) == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_layers_that_are_computed_again_change_no_bit(family: str, tmp_path: Path) -> None:
    base, runs = save_family(tmp_path, family), eight_runs()
    if family == "qwen3_moe":
        runs = [asked for asked in runs if set(asked.settings.target_modules) <= set(ATTENTION[:4])]
    kept = train(make_trainer(load(base)), runs)
    assert kept
    for recomputed in (1, 2):
        again = train(make_trainer(load(base, recomputed=recomputed)), runs)
        for name, result in kept.items():
            assert again[name].progress == result.progress
            assert difference(again[name].adapter, result.adapter) == 0
