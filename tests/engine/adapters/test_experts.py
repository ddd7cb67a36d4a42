"""LoRA of routed experts in both layouts on disk: in fp32, what PEFT gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tests.engine.conftest import LINEARS, load_base, save_adapter
from tests.engine.model.families import save_family, targets
from tests.engine.model.test_families import FamilyOracle, check, make_engine

ATTENTION = ["q_proj", "o_proj"]
BOTH = ["mlp.experts.gate_up_proj", "experts.down_proj"]
STACKED: dict[str, dict[str, Any]] = {
    "both": {"r": 3, "target_modules": ["v_proj"], "target_parameters": BOTH},
    "rslora": {"r": 9, "lora_alpha": 5, "use_rslora": True, "target_parameters": BOTH,
               "target_modules": ["v_proj"], "rank_pattern": {"experts.down_proj": 2}},
}  # fmt: skip
CASES: list[tuple[str | None, int]] = [
    ("both", 30),
    (None, 9),
    ("rslora", 12),
    ("plain", 7),
    ("both", 1),
]


def save_stacked(base: Path, folder: Path, seed: int, **config: Any) -> Path:
    """An adapter of experts' parameters with random B, as PEFT saves it."""
    torch.manual_seed(seed)
    model = get_peft_model(load_base(base), LoraConfig(task_type="CAUSAL_LM", **config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3 if "lora_B" in name else 0.1)
    model.save_pretrained(folder)
    return folder


def save_apart(base: Path, folder: Path, seed: int, **config: Any) -> Path:
    """An adapter of a linear of each expert, as PEFT saved it before transformers stacked them."""
    fields = json.loads((base / "config.json").read_text())
    hidden, inner, num = (
        fields[name] for name in ("hidden_size", "moe_intermediate_size", "num_local_experts")
    )
    save_adapter(base, folder, seed, r=4, target_modules=ATTENTION)
    tensors = load_file(folder / "adapter_model.safetensors")
    dense, generator = fields.get("mlp_only_layers") or [], torch.Generator().manual_seed(seed)
    for layer in range(fields["num_hidden_layers"]):
        for expert in range(num if layer not in dense else 0):
            for name in ("gate_proj", "up_proj", "down_proj"):
                into, out = (inner, hidden) if name == "down_proj" else (hidden, inner)
                module = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(4, into, generator=generator) * 0.1
                tensors[f"{module}.lora_B.weight"] = torch.randn(out, 4, generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    written = json.loads((folder / "adapter_config.json").read_text())
    written["target_modules"] = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
    (folder / "adapter_config.json").write_text(json.dumps({**written, **config}))
    return folder


MakeOracle = Callable[[str, str], FamilyOracle]


@pytest.fixture(scope="module")
def make_oracle(tmp_path_factory: pytest.TempPathFactory) -> MakeOracle:
    made: dict[tuple[str, str], FamilyOracle] = {}

    def make(family: str, layout: str) -> FamilyOracle:
        if (family, layout) not in made:
            base, folder = (tmp_path_factory.mktemp(name) for name in ("family", "adapters"))
            save_family(base, family)
            plain = save_adapter(
                base, folder / "plain", 9, r=8, target_modules=targets(base, LINEARS)
            )
            if layout == "stacked":
                own = {
                    name: save_stacked(base, folder / name, seed, **config)
                    for seed, (name, config) in enumerate(STACKED.items())
                }
            else:
                own = {
                    "both": save_apart(base, folder / "both", 1),
                    "rslora": save_apart(base, folder / "rslora", 2, lora_alpha=3),
                }
            made[family, layout] = FamilyOracle(base, {**own, "plain": plain})
        return made[family, layout]

    return make


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", "stacked"), ("qwen3_moe", "apart"), ("qwen3_5_moe", "stacked")],
)
def test_mixed_batch_equals_peft(make_oracle: MakeOracle, family: str, layout: str) -> None:
    oracle = make_oracle(family, layout)
    for max_step_tokens in (512, 19):
        engine = make_engine(oracle, max_step_tokens=max_step_tokens)
        check(engine, oracle, CASES, num_tokens=5)
        engine.close()
