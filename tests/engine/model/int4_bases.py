"""Tiny bases in 4 bits, written number by number as the formats' documents say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.model.fp8_bases import LAYER_LINEARS

#: name -> (quantization_config, group or None for whole rows, whether there are zeros)
FORMATS: dict[str, tuple[dict[str, Any], int | None, bool]] = {}


def _packed(group: int | None, *, symmetric: bool) -> dict[str, Any]:
    weights = {
        "num_bits": 4, "type": "int", "symmetric": symmetric, "dynamic": False, "actorder": None,
        "strategy": "channel" if group is None else "group", "group_size": group,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
    }


def _gptq(group: int | None, version: str) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": group or -1, "desc_act": False,
        "sym": False, "checkpoint_format": version, "damp_percent": 0.01, "true_sequential": True,
    }  # fmt: skip


def _awq(group: int | None, ignored: list[str] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": ignored,
    }  # fmt: skip


FORMATS["gptq"] = (_gptq(32, "gptq"), 32, True)
FORMATS["gptq-v2-rows"] = (_gptq(None, "gptq_v2"), None, True)
FORMATS["awq"] = (_awq(32, ["model.layers.1.mlp"]), 32, True)
FORMATS["packed"] = (_packed(32, symmetric=True), 32, False)
FORMATS["packed-zeros"] = (_packed(32, symmetric=False), 32, True)
FORMATS["packed-rows"] = (_packed(None, symmetric=True), None, False)

#: The same with every group.
EVERY = dict(FORMATS)
for _size in (64, 128, None):
    EVERY |= {
        f"gptq-{_size}": (_gptq(_size, "gptq"), _size, True),
        f"awq-{_size}": (_awq(_size), _size, True),
        f"packed-{_size}": (_packed(_size, symmetric=True), _size, False),
        f"packed-zeros-{_size}": (_packed(_size, symmetric=False), _size, True),
    }

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def _words(rows: list[list[int]]) -> torch.Tensor:
    """Eight numbers of 4 bits, from the lowest up, make a word of 32; a sign is its top bit."""
    words = [
        [sum(row[i + j] << 4 * j for j in range(8)) for i in range(0, len(row), 8)] for row in rows
    ]
    return torch.tensor([[w - (1 << 32) if w >> 31 else w for w in row] for row in words]).int()


def _awq_words(rows: list[list[int]]) -> torch.Tensor:
    return _words(
        [[row[i + column] for i in range(0, len(row), 8) for column in AWQ_COLUMNS] for row in rows]
    )


def _store_gptq(less: int) -> Callable[..., dict[str, torch.Tensor]]:
    def store(numbers: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
        group = numbers.shape[1] // scale.shape[1]
        return {
            "qweight": _words(numbers.tolist()).T.contiguous(),
            "qzeros": _words((zero - less).T.tolist()),
            "scales": scale.half().T.contiguous(),
            "g_idx": (torch.arange(numbers.shape[1]) // group).int(),
            "bias": torch.zeros(len(numbers)),
        }

    return store


def _store_awq(numbers: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
    return {
        "qweight": _awq_words(numbers.T.tolist()),
        "qzeros": _awq_words(zero.T.tolist()),
        "scales": scale.half().T.contiguous(),
    }


def _store_packed(numbers: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> dict[str, Any]:
    stored = {
        "weight_packed": _words(numbers.tolist()),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(numbers.shape),
    }
    if (zero != 8).any():
        stored["weight_zero_point"] = _words(zero.T.tolist()).T.contiguous()
    return stored


def save_checkpoint(base: Path, folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Write `base` as a checkpoint of a format; return its weights [N, K] fp32 by module."""
    config, group, has_zeros = EVERY[name]
    less_one = int(config.get("checkpoint_format") == "gptq")
    store = {"gptq": _store_gptq(less_one), "awq": _store_awq}.get(
        config["quant_method"], _store_packed
    )
    [ignored] = config.get("modules_to_not_convert") or ["none"]
    dense, tensors = {}, {}
    for key, tensor in load_file(base / "model.safetensors").items():
        module = key.removesuffix(".weight")
        is_linear = module.split(".")[-1] in LAYER_LINEARS and key != module
        if not is_linear or module.startswith(ignored):
            tensors[key] = tensor
            continue
        parts = tensor.view(len(tensor), -1, group or tensor.shape[1])
        low = parts.amin(dim=2) if has_zeros else -parts.abs().amax(dim=2)
        high = parts.amax(dim=2) if has_zeros else -low
        scale = ((high - low).clamp(min=1e-6) / 15).half().bfloat16().float()
        zero = (-low / scale).round().clamp(less_one, 15) if has_zeros else torch.full_like(low, 8)
        numbers = (parts / scale[..., None]).round() + zero[..., None]
        numbers = numbers.clamp(0, 15).int()
        dense[module] = ((numbers - zero[..., None]) * scale[..., None]).flatten(1)
        stored = store(numbers.flatten(1), zero.int(), scale)
        tensors = {f"{module}.{part}": value for part, value in stored.items()} | tensors
    folder.mkdir()
    fields = json.loads((base / "config.json").read_text())
    fields["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    for file in base.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return dense


def put_weights(model: Any, dense: dict[str, torch.Tensor]) -> None:
    """Have a Hugging Face model compute with these weights."""
    for name, module in model.named_modules():
        if name in dense:
            module.weight.data = dense[name].to(module.weight.dtype)
