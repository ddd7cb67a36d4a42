"""Small PEFT adapters written by hand: real files of any shape, right or wrong, in no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Tensors = dict[str, npt.NDArray[np.float32]]


def lora_config(rank: int = 4, **fields: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "inference_mode": True,
        **fields,
    }


def lora_tensors(base: dict[str, Any], *, seed: int, rank: int = 4) -> Tensors:
    """Random A and B for q_proj and v_proj of every layer of a base model's config.json."""
    rng = np.random.default_rng(seed)
    hidden = base["hidden_size"]
    head_dim = base.get("head_dim") or hidden // base["num_attention_heads"]
    rows = {
        "q_proj": base["num_attention_heads"] * head_dim,
        "v_proj": base["num_key_value_heads"] * head_dim,
    }
    tensors: Tensors = {}
    for layer in range(base["num_hidden_layers"]):
        for module, out in rows.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            a = rng.normal(0, hidden**-0.5, (rank, hidden))
            b = rng.normal(0, 0.1, (out, rank))  # strong enough to be seen in a few words
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    return tensors


def write_adapter(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config or lora_config()))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
