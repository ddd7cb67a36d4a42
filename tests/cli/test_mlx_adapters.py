"""An mlx-lm adapter computes after its conversion, by PEFT, what mlx-lm computes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lorikeet_cli.commands.adapters import read_folder
from lorikeet_cli.errors import CliError
from lorikeet_cli.mlx_adapters import convert
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from contract.adapters.base_shape import BaseShape
from contract.adapters.upload_check import check_adapter
from tests.cli.runner import Cli

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "attention_bias": True,
}
#: A configuration as mlx-lm writes it, with the settings of the training.
MLX: dict[str, Any] = {
    "adapter_path": "adapters",
    "batch_size": 4,
    "fine_tune_type": "lora",
    "iters": 100,
    "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    "lr_schedule": None,
    "model": "mlx-community/SmolLM2-135M-Instruct-4bit",
    "num_layers": 2,
    "optimizer_config": {"adam": {}, "adamw": {}},
    "seed": 0,
}
QV = ["self_attn.q_proj", "self_attn.v_proj"]
LINEARS = [*QV, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
TENSORS = "adapters.safetensors"


def base() -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def write_mlx(
    folder: Path, modules: list[str], *, dtype: Any = torch.float32, **config: Any
) -> Path:
    """An adapter of these modules with random tensors; None leaves a key out."""
    given = {key: value for key, value in {**MLX, **config}.items() if value is not None}
    rank, generator = given["lora_parameters"]["rank"], torch.Generator().manual_seed(2)
    tensors = {}
    for name in modules:
        linear = base().get_submodule(name)
        tensors[f"{name}.lora_a"] = torch.randn(linear.in_features, rank, generator=generator) * 0.1
        tensors[f"{name}.lora_b"] = (
            torch.randn(rank, linear.out_features, generator=generator) * 0.1
        )
        if given.get("fine_tune_type") == "dora" or given.get("use_dora"):
            noise = torch.rand(linear.out_features, generator=generator)
            tensors[f"{name}.m"] = linear.weight.detach().norm(dim=1) * (0.5 + noise)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file({name: t.to(dtype) for name, t in tensors.items()}, folder / TENSORS)
    return folder


def mlx_logits(folder: Path) -> torch.Tensor:
    """What LoRALinear and DoRALinear of mlx-lm compute, in torch."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale, model = config["lora_parameters"]["scale"], base()
    tensors = {name: t.float() for name, t in load_file(folder / TENSORS).items()}

    def hook(name: str) -> Callable[..., torch.Tensor]:
        a, b, m = (tensors.get(f"{name}.{part}") for part in ("lora_a", "lora_b", "m"))
        assert a is not None and b is not None

        def adapted(linear: torch.nn.Linear, inputs: Any, y: torch.Tensor) -> torch.Tensor:
            delta = scale * ((inputs[0] @ a) @ b)
            if m is None:
                return y + delta
            norm = (linear.weight + (scale * b.T) @ a.T).norm(dim=1)
            bias = 0 if linear.bias is None else linear.bias
            return (m / norm) * (y - bias + delta) + bias

        return adapted

    for name in {name.rpartition(".")[0] for name in tensors}:
        model.get_submodule(name).register_forward_hook(hook(name))
    return logits(model)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(40)[None]).logits
    return found


def converted(folder: Path) -> Path:
    raw = json.loads((folder / "adapter_config.json").read_text())
    convert(folder, raw, folder.with_name("peft"))
    return folder.with_name("peft")


def of_layers(layers: list[int], paths: list[str]) -> list[str]:
    return [f"model.layers.{layer}.{path}" for layer in layers for path in paths]


CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "the last layers": (of_layers([1, 2], QV), {}),
    "all layers": (of_layers([0, 1, 2], LINEARS), {"num_layers": -1}),
    "keys and a head": (
        [*of_layers([2], LINEARS), "lm_head"],
        {"lora_parameters": {**MLX["lora_parameters"], "keys": [*LINEARS, "lm_head"]}},
    ),
    "an odd scale": (
        of_layers([1, 2], QV),
        {"lora_parameters": {"rank": 7, "scale": 0.3, "dropout": 0.05}},
    ),
    "other modules in each layer": ([*of_layers([1], QV), *of_layers([2], LINEARS)], {}),
    "dora": (of_layers([1, 2], LINEARS), {"fine_tune_type": "dora"}),
    "of an early release": (
        of_layers([1, 2], QV),
        {"lora_layers": 2, "use_dora": True, "fine_tune_type": None, "num_layers": None},
    ),
    "fp16": (of_layers([1, 2], QV), {"dtype": torch.float16}),
    "bf16": (of_layers([1, 2], LINEARS), {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize(("modules", "config"), CASES.values(), ids=CASES)
def test_peft_computes_what_mlx_lm_computes(
    tmp_path: Path, modules: list[str], config: dict[str, Any]
) -> None:
    folder = write_mlx(tmp_path / "mlx", modules, **config)
    wanted, made = mlx_logits(folder), converted(folder)
    assert (wanted - logits(base())).abs().max() > 0.1, "it does something"
    found = logits(PeftModel.from_pretrained(base(), made).eval())
    assert torch.allclose(found, wanted, atol=1e-4)
    tensors = (made / "adapter_model.safetensors").read_bytes()
    fields = {**SIZES, "model_type": "llama"}
    checked = check_adapter(
        config=(made / "adapter_config.json").read_bytes(),
        start=tensors,
        file_bytes=len(tensors),
        base=BaseShape.from_config(fields),
        max_rank=64,
    )
    assert checked.fitted.matrices.keys() == set(modules)


def test_layers_are_named_where_all_have_the_same_modules(tmp_path: Path) -> None:
    made = converted(write_mlx(tmp_path / "mlx", of_layers([1, 2], QV)))
    config = json.loads((made / "adapter_config.json").read_text())
    assert config["layers_to_transform"] == [1, 2]
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"]) == (8, 160)
    assert config["base_model_name_or_path"] == MLX["model"]


PARAMETERS = MLX["lora_parameters"]
BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "the whole model": ({"fine_tune_type": "full"}, "fine_tune_type is full"),
    "another method": ({"fine_tune_type": "loha"}, "fine_tune_type is 'loha'"),
    "no parameters": ({"lora_parameters": None}, "lora_parameters is missing"),
    "an unknown one": ({"lora_parameters": {**PARAMETERS, "x": 1}}, "lora_parameters.x"),
    "no scale": ({"lora_parameters": {"rank": 8}}, "lora_parameters.scale"),
    "a scale of text": ({"lora_parameters": {**PARAMETERS, "scale": "20"}}, "scale"),
    "another rank": ({"lora_parameters": {**PARAMETERS, "rank": 4}}, "rank is 4, and"),
    "other keys": ({"lora_parameters": {**PARAMETERS, "keys": ["mlp.up_proj"]}}, "keys"),
    "fewer layers": ({"num_layers": 1}, "num_layers is 1"),
    "no magnitudes": ({"fine_tune_type": "dora"}, r"q_proj\.m is missing"),
}


@pytest.mark.parametrize(("config", "said"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_config_that_does_not_fit_is_refused_by_field(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    folder = write_mlx(tmp_path / "mlx", of_layers([1, 2], QV))
    (folder / "adapter_config.json").write_text(json.dumps({**MLX, **config}))
    with pytest.raises(CliError, match=said):
        converted(folder)
    assert not (tmp_path / "peft").exists()


def test_a_scale_that_two_releases_read_otherwise_is_refused(tmp_path: Path) -> None:
    """With num_layers, alpha is left over and mlx-lm does not read it."""
    folder = write_mlx(tmp_path / "mlx", of_layers([1, 2], QV))
    parameters = {**PARAMETERS, "alpha": 16, "scale": 10.0}
    early = {**MLX, "lora_layers": 2, "lora_parameters": parameters}
    del early["num_layers"]
    (folder / "adapter_config.json").write_text(json.dumps(early))
    with pytest.raises(CliError, match="alpha"):
        converted(folder)
    (folder / "adapter_config.json").write_text(json.dumps({**MLX, "lora_parameters": parameters}))
    assert json.loads((converted(folder) / "adapter_config.json").read_text())["lora_alpha"] == 80


BAD_TENSORS: dict[str, tuple[str, tuple[int, ...], str]] = {
    "the embedding": ("model.embed_tokens.lora_a", (96, 8), "tied head"),
    "experts": ("model.layers.1.self_attn.q_proj.lora_a", (2, 8, 32), "experts"),
    "a quantised matrix": (
        "model.layers.1.mlp.up_proj.lora_a_scales",
        (8, 4),
        "not a tensor of LoRA",
    ),
    "another model": ("language_model.model.layers.1.mlp.up_proj.lora_a", (32, 8), "not adapt"),
    "half a pair": ("model.layers.1.mlp.up_proj.lora_a", (32, 8), r"lora_b is missing"),
    "magnitudes": ("model.layers.1.self_attn.q_proj.m", (32,), "is of DoRA"),
}


@pytest.mark.parametrize(("name", "shape", "said"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_tensors_that_cannot_be_converted_are_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], said: str
) -> None:
    folder = write_mlx(tmp_path / "mlx", of_layers([1, 2], QV))
    tensors = {**load_file(folder / TENSORS), name: torch.zeros(shape)}
    save_file(tensors, folder / TENSORS)
    with pytest.raises(CliError, match=said) as caught:
        converted(folder)
    assert name.rpartition(".")[0] in str(caught.value)


@pytest.mark.parametrize("cut", [4, 7, 60, -1], ids=str)
def test_a_cut_file_is_refused(tmp_path: Path, cut: int) -> None:
    folder = write_mlx(tmp_path / "mlx", of_layers([1, 2], QV))
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:cut])
    with pytest.raises(CliError, match="not a complete safetensors"):
        converted(folder)


def test_the_command_writes_a_folder_once(tmp_path: Path) -> None:
    folder = write_mlx(tmp_path / "mlx", of_layers([1, 2], QV))
    cli = Cli(tmp_path)
    done = cli.run("adapters", "convert", str(folder))
    assert (done.code, done.out.strip()) == (0, f"{folder}-peft")
    assert set(read_folder(Path(done.out.strip()))) == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    again = cli.run("adapters", "convert", str(folder))
    assert again.code == 1 and "--to" in again.err


def test_an_upload_of_the_wrong_files_says_what_to_do(tmp_path: Path) -> None:
    folder = write_mlx(tmp_path / "mlx", of_layers([1, 2], QV))
    with pytest.raises(CliError, match=re.escape(f"lorikeet adapters convert {folder}")):
        read_folder(folder)
    (folder / TENSORS).rename(folder / "adapter_model.safetensors")
    with pytest.raises(CliError, match="lorikeet adapters convert"):
        read_folder(folder)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "f" * 64
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).write_text(pointer)
        with pytest.raises(CliError, match=rf"{name} is a Git LFS pointer"):
            read_folder(folder)
        (folder / name).write_text(json.dumps({"peft_type": "LORA"}))
