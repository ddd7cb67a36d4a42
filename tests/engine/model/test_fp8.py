"""FP8 bases: quantised at load or read from a checkpoint, they are what Hugging Face's are.

The oracle has the same quantised weights and rounds activations alike; adapters, by PEFT, read them
as they were before. A sum in another order may round an activation to its neighbour, so
log-probabilities are near, not equal.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from engine.errors import UnsupportedModel
from engine.model.config import ModelConfig
from engine.model.weights import dense, load_weights
from engine.request import ORIGINAL
from kernels.fp8 import quantize_tensor
from tests.engine.model.families import FUSED, save_family
from tests.engine.model.fp8_bases import FORMATS, keep_kv_in_fp8, make_fp8, save_checkpoint
from tests.engine.model.test_families import (
    CASES,
    WIDE,
    FamilyOracle,
    check,
    make_engine,
    save_adapters,
)

KINDS = ("llama", "mistral", "qwen2", "qwen3")

#: Those whose linears have other names are in `FUSED`.
FURTHER = (
    "gemma3", "olmo2", "granite", "cohere2", "smollm3-sliding", "olmo3", "seed_oss", "ministral3",
    "exaone4", "phi3", "glm4",
)  # fmt: skip
#: Differences of log-probabilities, the largest and the mean. If adapters read the rounded
#: activation, some would be above 0.3.
TOLERANCE, MEAN_TOLERANCE = 0.3, 0.04


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: save_family(tmp_path_factory.mktemp("family"), name))


@pytest.mark.parametrize("name", ["llama-biases", "mistral", "qwen2", "qwen3", *FURTHER])
def test_a_base_quantised_at_load(family: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    base = family(name)
    oracle = FamilyOracle(base, save_adapters(base, tmp_path), make_fp8, TOLERANCE)
    engine = make_engine(oracle, base_precision="fp8")
    check(engine, oracle)
    assert oracle.mean_error < MEAN_TOLERANCE
    engine.close()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(FORMATS, KINDS),
        *(("channel-token", kind) for kind in FURTHER if kind not in FUSED),
    ],
)
def test_a_checkpoint_of_each_format(
    family: Callable[[str], Path], tmp_path: Path, name: str, kind: str
) -> None:
    base = family(kind)
    adapters = save_adapters(base, tmp_path / "adapters")
    matrices = save_checkpoint(base, tmp_path / "fp8", name)
    change = functools.partial(make_fp8, matrices=matrices)
    oracle = FamilyOracle(base, adapters, change, TOLERANCE)
    engine = make_engine(oracle, model_dir=tmp_path / "fp8")
    check(engine, oracle)
    assert oracle.mean_error < MEAN_TOLERANCE
    engine.close()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3-yarn", *FURTHER])
def test_keys_and_values_in_fp8(family: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    base = family(name)
    oracle = FamilyOracle(base, save_adapters(base, tmp_path), keep_kv_in_fp8, TOLERANCE)
    engine = make_engine(oracle, kv_precision="fp8", page_size=64)
    check(engine, oracle)
    assert oracle.mean_error < MEAN_TOLERANCE
    assert check(engine, oracle)["0"] == 64  # cached tokens are of whole pages
    engine.close()


def to_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Round a matrix as FP8 tiles do; doing it again changes nothing."""
    numbers, scale = quantize_tensor(tensor)
    return numbers.float() * scale


def round_matrices(adapter: Path, rounded: Callable[[torch.Tensor], torch.Tensor] = to_fp8) -> None:
    """Round A and B of each linear."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "layers." in name and name.endswith((".lora_A.weight", ".lora_B.weight")):
            tensors[name] = rounded(tensor)
    save_file(tensors, adapter / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("name", "page_size"),
    [("qwen2", 16), *((name, 64) for name in (*KINDS, *FURTHER) if name not in FUSED)],
)
def test_adapters_in_fp8(
    family: Callable[[str], Path], tmp_path: Path, name: str, page_size: int
) -> None:
    """DoRA's B is rounded once more, after its factor is applied."""
    base = family(name)
    adapters = save_adapters(base, tmp_path)
    for folder in adapters.values():
        round_matrices(folder)
    oracle = FamilyOracle(base, adapters)
    engine = make_engine(oracle, adapter_precision="fp8", page_size=page_size)
    check(engine, oracle, [case for case in CASES if case[0] != "dora"])
    assert oracle.mean_error < 1e-4
    if name == "qwen2":
        oracle.tolerance = 2 * TOLERANCE
        check(engine, oracle, [("dora", 40), ("all", 33)])
        assert oracle.mean_error < 0.1
    engine.close()


def test_originals_beside_adapters_in_fp8(family: Callable[[str], Path], tmp_path: Path) -> None:
    """In one batch and one blend, each in its own precision: an original is what bf16 makes of it.

    DoRA's B is rounded to bf16 once more.
    """
    base = family("qwen2")
    copies, originals = (save_adapters(base, tmp_path / name) for name in ("fp8", "bf16"))
    for folder in copies.values():
        round_matrices(folder)
    for folder in originals.values():
        round_matrices(folder, lambda tensor: tensor.bfloat16().float())
    kept = {name + ORIGINAL: folder for name, folder in originals.items()}
    oracle = FamilyOracle(base, {**copies, **kept})
    oracle.blend("both", {"all": 0.5, "all" + ORIGINAL: 0.75})
    engine = make_engine(oracle, adapter_precision="fp8")
    adapters = ["all", "kv", *(name for name in kept if name != "dora" + ORIGINAL), "both", None]
    check(engine, oracle, [(adapter, 20 + i) for i, adapter in enumerate(adapters)])
    assert oracle.mean_error < 1e-4
    oracle.tolerance = 0.15
    check(engine, oracle, [("dora" + ORIGINAL, 40)])
    assert oracle.mean_error < 0.02
    engine.close()


#: So small that many keys and values are cut off.
KV_SCALES = [(0.004, 0.002), (0.003, 0.006)]
KV_SCHEME = {
    "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True,
}  # fmt: skip


def save_kv_scales(folder: Path, scheme: Mapping[str, Any] = KV_SCHEME, **more: Any) -> None:
    """Add the scales to a checkpoint of compressed-tensors, and other tensors of layer 0."""
    tensors = load_file(folder / "model.safetensors")
    for index, scales in enumerate(KV_SCALES):
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            tensors[f"model.layers.{index}.self_attn.{name}"] = torch.tensor([scale])
    tensors |= {f"model.layers.0.self_attn.{name}": tensor for name, tensor in more.items()}
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["kv_cache_scheme"] = scheme
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize("kv_precision", ["fp8", None])
def test_keys_and_values_with_the_checkpoints_scales(
    family: Callable[[str], Path], tmp_path: Path, kv_precision: str | None
) -> None:
    """Where keys and values are not in FP8, the scales mean nothing."""
    base, folder = family("llama"), tmp_path / "fp8"
    matrices = save_checkpoint(base, folder, "channel-token")
    save_kv_scales(folder)

    def change(model: Any) -> None:
        make_fp8(model, matrices)
        if kv_precision == "fp8":
            keep_kv_in_fp8(model, KV_SCALES)

    oracle = FamilyOracle(base, save_adapters(base, tmp_path), change, TOLERANCE)
    engine = make_engine(oracle, model_dir=folder, kv_precision=kv_precision, page_size=64)
    check(engine, oracle)
    assert oracle.mean_error < MEAN_TOLERANCE
    engine.close()


@pytest.mark.parametrize(
    ("tensor", "changed"),
    [
        ("k_scale", torch.ones(2)),  # one of each head
        ("v_scale", torch.zeros(1)),
        ("v_scale", torch.full((1,), float("nan"))),
        ("k_zero_point", torch.zeros(1)),
    ],
)
def test_scales_of_keys_and_values_are_refused_by_name(
    family: Callable[[str], Path], tmp_path: Path, tensor: str, changed: torch.Tensor
) -> None:
    save_checkpoint(family("llama"), tmp_path / "fp8", "channel-token")
    save_kv_scales(tmp_path / "fp8", KV_SCHEME, **{tensor: changed})
    assert refused(tmp_path / "fp8").param == f"model.layers.0.self_attn.{tensor}"


def check_weights(folder: Path, expected: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Check a folder's linears against those expected by module; others are not quantised."""
    weights = load_weights(folder, ModelConfig.from_folder(folder), "cpu", torch.float32)
    parts = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
    for index, layer in enumerate(weights.layers):
        for matrix_name, names in parts.items():
            room = "self_attn" if matrix_name in ("qkv", "o") else "mlp"
            modules = [f"model.layers.{index}.{room}.{name}_proj" for name in names]
            matrix = getattr(layer, matrix_name)
            if modules[0] not in expected:
                assert isinstance(matrix, torch.Tensor)
                continue
            wanted = torch.cat([expected[module].to(dtype) for module in modules])
            assert torch.equal(dense(matrix, dtype).to(dtype), wanted)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_checkpoints(tmp_path: Path, name: str, kind: str) -> None:
    base = save_family(tmp_path / "base", kind, **WIDE)
    matrices = save_checkpoint(base, tmp_path / "fp8", name)
    check_weights(tmp_path / "fp8", {k: m.dense() for k, m in matrices.items()}, torch.float32)


def by_transformers(folder: Path, config_class: type[Any]) -> dict[str, torch.Tensor]:
    """The linears of a folder's layers by module, as transformers dequantises them."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=config_class(dequantize=True)
    )
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in model.state_dict().items()
        if name.endswith("_proj.weight")
    }


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "fp8-vllm"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_transformers(tmp_path: Path, name: str, kind: str) -> None:
    """In bfloat16, as compressed-tensors multiplies by scales of bfloat16."""
    base = save_family(tmp_path / "base", kind, **WIDE)
    save_checkpoint(base, tmp_path / "fp8", name)
    config_class: type[Any] = FineGrainedFP8Config
    if FORMATS[name]["quant_method"] == "compressed-tensors":
        pytest.importorskip("compressed_tensors")  # GPU machines have none
        config_class = CompressedTensorsConfig
    check_weights(tmp_path / "fp8", by_transformers(tmp_path / "fp8", config_class), torch.bfloat16)


def refused(folder: Path, device: str = "cuda") -> UnsupportedModel:
    """Load to a GPU: without one, whatever is not refused before it is used fails otherwise."""
    with pytest.raises(UnsupportedModel) as caught:
        load_weights(folder, ModelConfig.from_folder(folder), device, torch.float32)
    return caught.value


def edit(fields: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        fields = fields[parent]
    fields[last] = value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_bits", 4),
        ("type", "int"),
        ("strategy", "attn_head"),
        ("dynamic", True),
        ("symmetric", False),
    ],
)
def test_other_kv_cache_schemes_are_refused_by_name(
    family: Callable[[str], Path], tmp_path: Path, field: str, value: Any
) -> None:
    save_checkpoint(family("llama"), tmp_path / "fp8", "channel-token")
    save_kv_scales(tmp_path / "fp8", {**KV_SCHEME, field: value})
    assert refused(tmp_path / "fp8").param == f"quantization_config.kv_cache_scheme.{field}"


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("fp8-dynamic", "kv_cache_scheme", KV_SCHEME),
        ("fp8-dynamic", "quant_method", "hqq"),
        ("fp8-dynamic", "quant_method", "bitsandbytes"),
        ("fp8-dynamic", "quant_method", None),
        ("fp8-dynamic", "quant_method", ["fp8"]),
        ("fp8-dynamic", "fmt", "e5m2"),
        ("fp8-dynamic", "weight_block_size", [64, 128]),
        ("fp8-dynamic", "weight_block_size", [0, 0]),
        ("fp8-dynamic", "weight_block_size", 0),
        ("fp8-blocks", "activation_scheme", "static"),
        ("fp8-dynamic", "activation_scheme", "sometimes"),
        ("fp8-dynamic", "ignored_layers", "lm_head"),
        ("fp8-dynamic", "ignored_layers", ["lm_haed"]),
        ("fp8-dynamic", "modules_to_not_convert", ["model.layers.2", "re:.*vision"]),
        ("fp8-dynamic", "new_field", True),
        ("channel-token", "format", "int-quantized"),
        ("channel-token", "ignore", ["re:("]),
        ("channel-token", "ignore", ["gate"]),
        ("channel-token", "config_groups", {}),
        ("channel-token", "config_groups.group_0", 5),
        ("channel-token", "config_groups.group_0.targets", ["Linear", "Embedding"]),
        ("channel-token", "config_groups.group_0.weights", None),
        ("channel-token", "config_groups.group_0.format", "pack-quantized"),
        ("channel-token", "config_groups.group_0.new_field", True),
        ("channel-token", "config_groups.group_0.weights.new_field", True),
        ("channel-token", "config_groups.group_0.weights.dynamic", True),
        ("channel-token", "config_groups.group_0.weights.num_bits", 4),
        ("channel-token", "config_groups.group_0.weights.type", "int"),
        ("channel-token", "config_groups.group_0.weights.strategy", "group"),
        ("channel-token", "config_groups.group_0.weights.symmetric", False),
        ("channel-token", "config_groups.group_0.weights.group_size", 128),
        ("channel-token", "config_groups.group_0.input_activations", None),
        ("channel-token", "config_groups.group_0.input_activations.strategy", "group"),
        ("channel-token", "config_groups.group_0.input_activations.dynamic", "local"),
        ("channel-token", "config_groups.group_0.output_activations", {"num_bits": 8}),
    ],
)
def test_a_config_is_refused_by_the_name_of_its_field(
    family: Callable[[str], Path], tmp_path: Path, name: str, path: str, value: Any
) -> None:
    fields = json.loads((family("llama") / "config.json").read_text())
    fields["quantization_config"] = json.loads(json.dumps(FORMATS[name]))
    edit(fields["quantization_config"], path, value)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedModel) as caught:
        ModelConfig.from_folder(tmp_path)
    assert caught.value.param == f"quantization_config.{path}"
    assert f"quantization_config.{path}" in str(caught.value)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("problem", "named"),
    [
        ("blocks cut", "model.layers.1.self_attn.q_proj.weight_scale_inv"),
        ("block of zero", "model.layers.1.self_attn.q_proj.weight_scale_inv"),
        ("no scale", f"{Q}.weight_scale"),
        ("scales cut", f"{Q}.weight_scale"),
        ("scale of NaN", f"{Q}.weight_scale"),
        ("infinite scale", f"{Q}.weight_scale"),
        ("scale of zero", f"{Q}.weight_scale"),
        ("negative scale", f"{Q}.weight_scale"),
        ("weight of NaN", f"{Q}.weight"),
        ("weight in bf16", f"{Q}.weight"),
        ("weight cut", f"{Q}.weight"),
        ("input scale unasked", "model.layers.0.mlp.down_proj.input_scale"),
        ("no input scale, as static", f"{Q}.activation_scale"),
        ("input scale of zero, as static", f"{Q}.activation_scale"),
        ("input scales of rows, as static", f"{Q}.activation_scale"),
        ("half ignored", "quantization_config"),
        ("all ignored", f"{Q}.weight"),
        ("no config", f"{Q}.weight"),
    ],
)
def test_a_checkpoint_is_refused_by_the_name_of_its_tensor(
    family: Callable[[str], Path], tmp_path: Path, problem: str, named: str
) -> None:
    folder = tmp_path / "fp8"
    kinds = {"block": "fp8-blocks", "as static": "fp8-static"}
    name = next((kinds[word] for word in kinds if word in problem), "channel-token")
    save_checkpoint(family("llama"), folder, name)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    scale, weight = f"{Q}.weight_scale", f"{Q}.weight"
    changes: dict[str, Callable[[], object]] = {
        "no scale": lambda: tensors.pop(scale),
        "scales cut": lambda: tensors.update({scale: tensors[scale][:5].clone()}),
        "scale of NaN": lambda: tensors[scale][3].fill_(float("nan")),
        "infinite scale": lambda: tensors[scale][3].fill_(float("inf")),
        "scale of zero": lambda: tensors[scale][3].fill_(0),
        "negative scale": lambda: tensors[scale][3].neg_(),
        "weight of NaN": lambda: tensors[weight].view(torch.uint8)[2, 2].fill_(0x7F),
        "weight in bf16": lambda: tensors.update({weight: tensors[weight].bfloat16()}),
        "weight cut": lambda: tensors.update({weight: tensors[weight][:8].clone()}),
        "input scale unasked": lambda: tensors.update({named: torch.ones(1)}),
        "no input scale, as static": lambda: tensors.pop(named),
        "input scale of zero, as static": lambda: tensors[named].fill_(0),
        "input scales of rows, as static": lambda: tensors.update({named: torch.ones(64)}),
        "half ignored": lambda: config["quantization_config"].update(ignore=[Q]),
        "all ignored": lambda: config["quantization_config"].update(ignore=["model.layers"]),
        "no config": lambda: config.pop("quantization_config"),
        "blocks cut": lambda: tensors.update({named: torch.ones(3, 1)}),
        "block of zero": lambda: tensors[named].fill_(0),
    }
    changes[problem]()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    # Numbers are not read twice.
    error = refused(folder, "cpu" if problem == "weight of NaN" else "cuda")
    assert error.param == named
    assert named in str(error)
