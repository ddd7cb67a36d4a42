"""Tiny FP8 bases, and what Hugging Face and PEFT make of the same quantised weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels.fp8 import FP8, FP8_MAX, Fp8Matrix, quantize_matrix, quantize_rows_ref
from kernels.fp8_groups import GROUP

LAYER_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Those of families that have several as one.
FUSED_LINEARS = ("qkv_proj", "gate_up_proj")
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(strategy: str, inputs: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**WEIGHTS, "strategy": strategy},
                "input_activations": {**INPUTS, **inputs},
                "output_activations": None,
            }
        },
        **fields,
    }


#: name -> quantization_config
FORMATS: dict[str, dict[str, Any]] = {
    "fp8-dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"},
    "fp8-static": {
        "quant_method": "fp8", "activation_scheme": "static",
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"],
    },
    "fp8-vllm": {
        "quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"],
    },
    "fp8-blocks": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"],
    },
    "channel-token": compressed("channel", {"strategy": "token", "dynamic": True}),
    "tensor-static": compressed(
        "tensor", {"strategy": "tensor", "dynamic": False}, ignore=["re:.*layers[.]0[.]self_attn.*"]
    ),
}  # fmt: skip
_IGNORED = {
    "fp8-static": "model.layers.1.mlp",
    "tensor-static": "model.layers.0.self_attn",
    "fp8-blocks": "model.layers.0.self_attn",
}


def save_checkpoint(base: Path, folder: Path, name: str) -> dict[str, Fp8Matrix]:
    """Write `base` as a checkpoint of a format; return its matrices by module."""
    config = FORMATS[name]
    is_channel = name == "channel-token"
    matrices, tensors = {}, {}
    for key, tensor in load_file(base / "model.safetensors").items():
        module = key.removesuffix(".weight")
        is_ignored = module.startswith(_IGNORED.get(name, "none"))
        if module.split(".")[-1] not in LAYER_LINEARS or key.endswith("bias") or is_ignored:
            tensors[key] = tensor
            continue
        if name == "fp8-blocks":
            matrices[module], scale = quantize_blocks(tensor)
            tensors[key] = matrices[module].numbers
            tensors[f"{module}.weight_scale_inv"] = scale
            continue
        peak = tensor.abs().amax(dim=1) if is_channel else tensor.abs().max().reshape(1)
        scale = (peak / FP8_MAX).to(torch.bfloat16).float()
        numbers = (tensor / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        inputs = torch.tensor([0.02]) if "static" in name or name == "fp8-vllm" else None
        tensors[key] = numbers
        stored = scale.to(torch.bfloat16)
        if name in ("fp8-dynamic", "fp8-static"):  # as transformers writes them
            tensors[f"{module}.weight_scale_inv"] = scale.squeeze()
            if inputs is not None:
                tensors[f"{module}.activation_scale"] = inputs.squeeze()
        else:
            tensors[f"{module}.weight_scale"] = stored[:, None] if is_channel else stored
            if inputs is not None:
                tensors[f"{module}.input_scale"] = inputs
        matrices[module] = Fp8Matrix(numbers, scale.expand(len(tensor)).contiguous(), inputs)
    folder.mkdir()
    fields = json.loads((base / "config.json").read_text())
    fields["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    for file in base.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return matrices


def quantize_blocks(weight: torch.Tensor) -> tuple[Fp8Matrix, torch.Tensor]:
    """Quantise a weight by blocks; -> (the matrix, the scales of its blocks)."""
    height, width = weight.shape
    rows, columns = -(-height // GROUP), -(-width // GROUP)
    padded = torch.zeros(rows * GROUP, columns * GROUP)
    padded[:height, :width] = weight
    scale = padded.view(rows, GROUP, columns, GROUP).abs().amax(dim=(1, 3)) / FP8_MAX
    groups = scale.repeat_interleave(GROUP, dim=0)[:height]
    dense = groups.repeat_interleave(GROUP, dim=1)[:, :width]
    numbers = (weight / dense).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return Fp8Matrix(numbers, torch.ones(height), groups=groups), scale


def make_fp8(model: Any, matrices: dict[str, Fp8Matrix] | None = None) -> None:
    """Have a Hugging Face model compute what its quantised linears do, in its own arithmetic.

    matrices  by module; None: all linears of the layers, quantised by output channel
    """
    for name, module in model.named_modules():
        if name.split(".")[-1] not in LAYER_LINEARS + FUSED_LINEARS:
            continue
        if matrices is not None and name not in matrices:
            continue
        weight = module.weight.data
        matrix = quantize_matrix(weight) if matrices is None else matrices[name]
        module.weight.data = matrix.dense(weight.dtype)

        def quantize(
            _: Any, args: tuple[torch.Tensor], fixed: torch.Tensor | None = matrix.input_scale
        ) -> tuple[torch.Tensor]:
            rows = quantize_rows_ref(args[0].flatten(0, -2), fixed)
            return (rows.dense().view(args[0].shape).to(args[0].dtype),)

        module.register_forward_pre_hook(quantize)


def _attend_fp8(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Attend as sdpa does, to keys and values as E4M3 keeps them."""
    key, value = (
        (each / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).to(query.dtype) * scale
        for each, scale in zip((key, value), module.kv_scales, strict=True)
    )
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


def keep_kv_in_fp8(model: Any, scales: Sequence[tuple[float, float]] = ()) -> None:
    """Have a Hugging Face model attend to rounded keys and values.

    scales  each layer's (scale of keys, scale of values); empty: all are 1
    """
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.kv_scales = scales[index] if scales else (1.0, 1.0)
    AttentionInterface.register("fp8_kv", _attend_fp8)
    AttentionMaskInterface.register("fp8_kv", sdpa_mask)
    model.set_attn_implementation("fp8_kv")
