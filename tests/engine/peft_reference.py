"""PEFT's arithmetic once more, slowly and for blends too, from adapter folders alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

PREFIX = "base_model.model."


@dataclass
class Part:
    """What one adapter does to one module, times its weight in the blend."""

    weight: float
    scaling: float
    tensors: dict[str, torch.Tensor]

    def delta(self, module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What is added to y, the module's own output for x."""
        base = module.weight
        if isinstance(module, torch.nn.Embedding):
            a, b = self.tensors["lora_embedding_A"], self.tensors["lora_embedding_B"]
            lora, base = a.T[x] @ b.T, base.T
        else:
            a, b = self.tensors["lora_A.weight"], self.tensors["lora_B.weight"]
            lora = x @ a.T @ b.T + self.tensors.get("lora_B.bias", torch.zeros(()))
        if "lora_magnitude_vector" not in self.tensors:
            return self.weight * self.scaling * lora
        norm = (base + self.scaling * b @ a).norm(dim=1)
        factor = self.tensors["lora_magnitude_vector"] / norm
        bias = getattr(module, "bias", None)
        product = y if bias is None else y - bias
        return self.weight * ((factor - 1) * product + factor * self.scaling * lora)


class Reference:
    """A base model to which blends of adapters are applied without merging anything."""

    def __init__(self, base: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()

    def logits(self, token_ids: list[int], blend: dict[Path, float]) -> torch.Tensor:
        """[tokens, V]"""
        parts: dict[str, list[Part]] = {}
        for folder, weight in blend.items():
            for module, part in _parts(folder, weight).items():
                parts.setdefault(module, []).append(part)
        modules = dict(self._model.named_modules())
        handles = [modules[name].register_forward_hook(_hook(own)) for name, own in parts.items()]
        try:
            with torch.no_grad():
                logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return logits


def _hook(parts: list[Part]) -> Callable[..., torch.Tensor]:
    def add(module: torch.nn.Module, inputs: tuple[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return y + sum(part.delta(module, inputs[0], y) for part in parts)

    return add


def _parts(folder: Path, weight: float) -> dict[str, Part]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    found: dict[str, Part] = {}
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        module, _, rest = name.removeprefix(PREFIX).partition(".lora_")
        if not rest:  # a copy of the base's own
            continue
        if module not in found:
            rank = config["rank_pattern"].get(
                get_pattern_key(config["rank_pattern"], module), config["r"]
            )
            alpha = config["alpha_pattern"].get(
                get_pattern_key(config["alpha_pattern"], module), config["lora_alpha"]
            )
            divisor = math.sqrt(rank) if config["use_rslora"] else rank
            found[module] = Part(weight, alpha / divisor, {})
        found[module].tensors[f"lora_{rest}"] = tensor.float()
    return found
