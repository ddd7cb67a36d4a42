"""LoRA of routed experts in both layouts on disk: in fp32, what PEFT gives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load, load_file, save_file

from contract.adapters.base_shape import BaseShape
from contract.adapters.problems import AdapterProblems
from contract.adapters.upload_check import check_adapter
from engine import AdapterMismatch, Engine, EngineConfig
from engine.adapters.plan import plan_adapter
from engine.model.config import ModelConfig
from tests.engine.conftest import LINEARS, SMALL, prompt, request, run, save_adapter
from tests.engine.model.families import save_family, targets
from tests.engine.model.test_families import FamilyOracle, check, make_engine

ATTENTION = ["q_proj", "o_proj"]
BOTH = ["mlp.experts.gate_up_proj", "experts.down_proj"]
STACKED_NAMES = ("gate_up_proj", "down_proj")
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
                    name: save_adapter(base, folder / name, seed, **config)
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


def blended(oracle: FamilyOracle, weights: dict[str, float], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token with several adapters at once, by PEFT."""
    model = oracle._model
    scaled = [each.scaling for each in model.modules() if isinstance(each, LoraLayer)]

    def scale(power: int) -> None:
        for scaling in scaled:
            for name in weights.keys() & scaling.keys():
                scaling[name] *= weights[name] ** power

    scale(1)
    model.base_model.set_adapter(list(weights))
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0, -1]
    scale(-1)
    return logits.log_softmax(-1)


@pytest.mark.parametrize("layout", ["stacked", "apart"])
def test_blends_equal_peft(make_oracle: MakeOracle, layout: str) -> None:
    """Also with an adapter that changes no experts."""
    oracle = make_oracle("qwen3_moe", layout)
    engine = make_engine(oracle)
    tokens = prompt(1, 20)
    for weights in ({"both": 0.5, "plain": 1.5}, {"plain": 1.0, "both": 1.0, "rslora": -0.5}):
        made = request("r", tokens, adapter=weights, max_tokens=1, logprobs=20)
        [found] = run(engine, made, check=True)["r"].logprobs
        wanted = blended(oracle, weights, tokens)
        for token_id, logprob in found.top:
            assert wanted[token_id].item() == pytest.approx(logprob, abs=1e-3)
    engine.close()


def test_one_parameter_alone(tmp_path: Path) -> None:
    """PEFT then writes its tensors where it writes those of the last of two."""
    base = save_family(tmp_path / "base", "qwen3_moe")
    adapters = {
        name: save_adapter(base, tmp_path / name, r=5, target_modules=[], target_parameters=[name])
        for name in STACKED_NAMES
    }
    for name, path in adapters.items():  # PEFT wants the same parameters in all of a model
        oracle = FamilyOracle(base, {name: path})
        engine = make_engine(oracle)
        check(engine, oracle, [(name, 11), (None, 3)], num_tokens=3)
        engine.close()


#: case -> (adapter, what its config says, the field or tensor that is named)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a parameter of none": ("both", {"target_parameters": [*BOTH, "gate.weight"]}, "_parameters"),
    "one that is not named": (
        "both", {"target_parameters": BOTH[:1]}, r"mlp\.experts\.base_layer\.lora_[AB]",
    ),
    "dora": ("both", {"use_dora": True}, "use_dora"),
    "biases": ("apart", {"lora_bias": True}, "lora_bias"),
    "rslora of single experts": ("apart", {"use_rslora": True}, "use_rslora"),
    "their ranks": ("apart", {"rank_pattern": {"experts.1.up_proj": 4}}, "rank_pattern"),
    "their alphas": ("apart", {"alpha_pattern": {"down_proj": 4}}, "alpha_pattern"),
    "gates without ups": (
        "apart", {"target_modules": [*ATTENTION, "gate_proj"]}, "target_modules",
    ),
    "both layouts": (
        "apart", {"target_parameters": BOTH}, r"mlp\.experts\.[0-9]\.[a-z_]+\.lora_[AB]",
    ),
    "another rank": ("both", {"r": 2}, "^r$"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    base = save_family(folder / "base", "qwen3_moe")
    both = save_adapter(base, folder / "both", **STACKED["both"])
    return {"base": base, "both": both, "apart": save_apart(base, folder / "apart", 1)}


@pytest.mark.parametrize(("name", "change", "named"), REFUSED.values(), ids=REFUSED)
def test_what_is_ambiguous_is_refused_by_name(
    saved: dict[str, Path], name: str, change: dict[str, Any], named: str
) -> None:
    """At upload and by the engine."""
    config = {**json.loads((saved[name] / "adapter_config.json").read_text()), **change}
    start = (saved[name] / "adapter_model.safetensors").read_bytes()
    fields = json.loads((saved["base"] / "config.json").read_text())
    with pytest.raises(AdapterProblems) as caught:
        check_adapter(
            config=json.dumps(config).encode(),
            start=start,
            file_bytes=len(start),
            base=BaseShape.from_config(fields),
            max_rank=64,
        )
    assert any(re.search(named, problem.field) for problem in caught.value.problems)
    shapes = {key: tuple(value.shape) for key, value in load(start).items()}
    with pytest.raises(AdapterMismatch) as raised:
        plan_adapter(config, shapes, ModelConfig.from_folder(saved["base"]))
    assert re.search(named, raised.value.param or "")


def test_matrices_that_versions_of_peft_read_in_two_ways_are_refused(tmp_path: Path) -> None:
    base = save_family(tmp_path / "base", "qwen3_moe", moe_intermediate_size=32)  # 2 * 32 = hidden
    folder = save_adapter(base, tmp_path / "adapter", **STACKED["both"])
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    with pytest.raises(AdapterMismatch, match="gate_up_proj: versions of PEFT") as raised:
        plan_adapter(config, shapes, ModelConfig.from_folder(base))
    assert raised.value.param == "target_parameters"


def test_a_gpu_refuses_them(saved: dict[str, Path]) -> None:
    settings: dict[str, Any] = {"model_dir": saved["base"], "use_triton": True, **SMALL}
    engine = Engine(EngineConfig(**settings))
    for name in ("both", "apart"):
        with pytest.raises(AdapterMismatch, match="changes routed experts, which a GPU"):
            engine.register_adapter(name, saved[name])
    engine.close()
