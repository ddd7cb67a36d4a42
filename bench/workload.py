"""Makes seeded models, prompts, adapters and arrivals, so that two systems get the same work."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model.config import ModelConfig
from engine.model.weights import LINEARS, LayerWeights, Weights
from kernels.delta import DeltaWeights
from kernels.experts import ExpertWeights
from kernels.int4 import Int4Matrix

# config.json of models with random weights.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}
SHAPES["qwen3.5-9b"] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}
SHAPES["tiny-hybrid"] = SHAPES["tiny"] | {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SHAPES["tiny-wide"] = SHAPES["tiny"] | {"vocab_size": 49152}
SHAPES["qwen3-30b-a3b"] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
SHAPES["tiny-experts"] = SHAPES["tiny"] | {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Make `count` prompts of `length` random token ids."""
    choose = random.Random(seed)
    return [[choose.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def random_weights(model: ModelConfig, device: str, dtype: torch.dtype) -> Weights:
    """Make random weights of the model's shape that keep activations near one."""

    def matrix(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(0, shape[-1] ** -0.5)

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=device, dtype=torch.float32 if plan.norm_offset else dtype)

    def mixer(layer: int) -> dict[str, Any]:
        delta, heads = plan.delta, model.q_rows + 2 * model.kv_size
        if delta is None or layer not in plan.delta_layers:
            norm = ones(2, model.head_dim) if plan.qk_norm == "head" else None
            o = matrix(hidden, model.q_size)
            return {"qkv": matrix(heads, hidden), "o": o, "qk_norm": norm}
        rate, shift = matrix(2, delta.num_values)
        own = DeltaWeights(
            convolution=matrix(delta.widths[0], delta.kernel),
            rate=rate,
            shift=shift,
            norm=torch.ones(delta.value_dim, device=device, dtype=dtype),
        )
        qkv, o = matrix(sum(delta.widths), hidden), matrix(hidden, delta.value_size)
        return {"qkv": qkv, "o": o, "delta": own}

    def mlp(layer: int) -> dict[str, Any]:
        shape, experts = plan.experts, None
        inner = model.intermediate_size
        if shape is not None and layer in plan.expert_layers:
            gate_up = matrix(shape.num, 2 * shape.inner, hidden)
            down = matrix(shape.num, hidden, shape.inner)
            shared = matrix(1, hidden) if shape.has_shared else None
            experts = ExpertWeights(matrix(shape.num, hidden), gate_up, down, shared)
            inner = inner if shape.has_shared else 0
        down = matrix(hidden, inner) if inner else ones(hidden, 0)
        return {"gate_up": matrix(2 * inner, hidden), "down": down, "experts": experts}

    plan, hidden = model.plan, model.hidden_size
    return Weights(
        embedding=matrix(model.vocab_size, hidden),
        layers=tuple(
            LayerWeights(
                attention_norm=ones(hidden), mlp_norm=ones(hidden), **mixer(layer), **mlp(layer)
            )
            for layer in range(model.num_layers)
        ),
        norm=ones(hidden),
        lm_head=matrix(model.vocab_size, hidden),
    )


def in_4_bits(weights: Weights, group: int = 128) -> Weights:
    """Return weights of the same shapes whose layers' linears are random numbers of 4 bits."""

    def matrix(dense: torch.Tensor) -> Int4Matrix:
        height, width = dense.shape
        low, high = -(1 << 31), (1 << 31) - 1
        packed = torch.randint(low, high, (height, width // 8), device=dense.device)
        scale = dense.new_full((width // group, height), width**-0.5 / 4.6)
        zero = torch.full(scale.shape, 8, dtype=torch.uint8, device=dense.device)
        return Int4Matrix(packed.to(torch.int32), scale, zero)

    def packed(layer: LayerWeights) -> LayerWeights:
        changed: dict[str, Any] = {name: matrix(getattr(layer, name)) for name in LINEARS}
        return replace(layer, **changed)

    return replace(weights, layers=tuple(map(packed, weights.layers)))


def save_random_adapter(
    folder: Path,
    model: ModelConfig,
    *,
    rank: int,
    seed: int,
    projections: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Path:
    """Write a PEFT folder with random A and B of `rank` on some linears of every layer.

    projections  None: all that adapters of the model may change
    device  draws the numbers; a GPU is faster
    """
    if projections is None:
        projections = tuple(model.linears(0).values())
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(height: int, width: int, scale: float) -> torch.Tensor:
        drawn = torch.randn(height, width, generator=generator, device=device) * scale
        return drawn.to(dtype).cpu()

    tensors, modules = {}, set()
    for layer in range(model.num_layers):
        for module, projection in model.linears(layer).items():
            if projection not in projections:
                continue
            in_width, out_width = model.widths(layer)[projection]
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = draw(rank, in_width, in_width**-0.5)
            tensors[f"{name}.lora_B.weight"] = draw(out_width, rank, 0.02)
            modules.add(module.rpartition(".")[2])
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: seconds after its beginning, lengths in tokens, and adapter."""

    at: float
    prompt: int
    new: int
    adapter: int


def slora_trace(
    count: int,
    *,
    rate: float,
    adapters: int,
    shortest: int = 8,
    longest: int = 512,
    alpha: float = 1.0,
    cv: float = 1.0,
    seed: int = 0,
) -> list[Arrival]:
    """Make S-LoRA's synthetic workload (arXiv:2311.03285, section 7.1).

    Gamma arrivals of `rate` requests a second with coefficient of variation `cv`, lengths uniform
    in [shortest, longest], the i-th adapter chosen in proportion to i ** -alpha. Arrivals and
    lengths do not depend on the number of adapters.
    """
    timing, length, choose = (random.Random(f"{seed} {name}") for name in ("at", "len", "who"))
    shape = 1 / cv**2
    weights = list(itertools.accumulate((i + 1) ** -alpha for i in range(max(adapters, 1))))
    now, trace = 0.0, []
    for _ in range(count):
        now += timing.gammavariate(shape, 1 / (shape * rate))
        trace.append(
            Arrival(
                at=now,
                prompt=length.randint(shortest, longest),
                new=length.randint(shortest, longest),
                adapter=choose.choices(range(len(weights)), cum_weights=weights)[0],
            )
        )
    return trace
