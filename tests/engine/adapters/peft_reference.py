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

from tests.engine.conftest import load_base

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


@dataclass
class NewRows:
    """Rows of a module that one adapter replaces, to the degree of its weight in the blend."""

    weight: float
    token_ids: list[int]
    rows: torch.Tensor

    def delta(self, module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What is added to y, the module's own output for x."""
        difference = torch.zeros_like(module.weight)
        difference[self.token_ids] = self.rows - module.weight[self.token_ids]
        is_embedding = isinstance(module, torch.nn.Embedding)
        return self.weight * (difference[x] if is_embedding else x @ difference.T)


class Reference:
    """A base model to which blends of adapters are applied without merging anything."""

    def __init__(self, base: Path) -> None:
        self._model = load_base(base)

    def logits(self, token_ids: list[int], blend: dict[Path, float]) -> torch.Tensor:
        """[tokens, V]"""
        parts: dict[str, list[Part | NewRows]] = {}
        for folder, weight in blend.items():
            for found in (_parts(folder, weight), self._new_rows(folder, weight)):
                for module, part in found.items():
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

    def _new_rows(self, folder: Path, weight: float) -> dict[str, NewRows]:
        config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
        vocab_size = self._model.config.vocab_size
        given = config["trainable_token_indices"] or {}
        given = given if isinstance(given, dict) else {"embed_tokens": given}
        names = {"embed_tokens": "model.embed_tokens"}
        token_ids = {names.get(name, name): ids for name, ids in given.items()}
        for name in config["modules_to_save"] or ():
            token_ids[names.get(name, name)] = list(range(vocab_size))
        found = {}
        for name, tensor in load_file(folder / "adapter_model.safetensors").items():
            module, _, rest = name.removeprefix(PREFIX).partition(".token_adapter.")
            module = module.removesuffix(".weight")
            if rest or module in token_ids:
                found[module] = NewRows(weight, token_ids[module], tensor.float())
        is_tied = self._model.config.tie_word_embeddings
        if is_tied and "model.embed_tokens" in found and "lm_head" not in found:
            if not config["modules_to_save"]:
                found["lm_head"] = found["model.embed_tokens"]
        return found


def _hook(parts: list[Part | NewRows]) -> Callable[..., torch.Tensor]:
    def add(module: torch.nn.Module, inputs: tuple[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        scale = getattr(module, "embed_scale", 1.0)  # of Gemma's embedding, which includes it
        return y + scale * sum(part.delta(module, inputs[0], y / scale) for part in parts)

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
