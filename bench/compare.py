"""Times PEFT's own mixed batch (`adapter_names`) with the same adapters as the engine's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig


class PeftBatch:
    """transformers' generate with random weights of a shape, and PEFT adapters from folders."""

    def __init__(
        self, shape: dict[str, Any], folders: list[Path], device: str, dtype: torch.dtype
    ) -> None:
        config = LlamaConfig(**{k: v for k, v in shape.items() if k != "model_type"})
        with torch.device(device):
            base: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self._device, self._vocab_size = device, config.vocab_size
        self._names = [f"a{i}" for i in range(len(folders))]
        self._model: Any = base
        for name, folder in zip(self._names, folders, strict=True):
            # First on the meta device: drawing weights that are then replaced takes a second each.
            if self._model is base:
                self._model = PeftModel.from_pretrained(
                    base, folder, adapter_name=name, low_cpu_mem_usage=True
                ).eval()
            else:
                self._model.load_adapter(folder, adapter_name=name, low_cpu_mem_usage=True)
        self._model.to(device, dtype)

    def ms_step(self, batch: int, prompt: int, steps: int) -> float:
        """Return the milliseconds of one decode step, averaged over `steps` after the prefill."""
        token_ids = torch.randint(0, self._vocab_size, (batch, prompt), device=self._device)
        names = [self._names[i * len(self._names) // batch] for i in range(batch)]
        self._seconds(token_ids, names, 2)
        prefill = self._seconds(token_ids, names, 1)
        return 1e3 * (self._seconds(token_ids, names, 1 + steps) - prefill) / steps

    @torch.inference_mode()
    def _seconds(self, token_ids: torch.Tensor, names: list[str], new: int) -> float:
        options: dict[str, Any] = {"adapter_names": names} if names else {}
        if token_ids.is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        out = self._model.generate(
            input_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=new,
            min_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            **options,
        )
        if token_ids.is_cuda:
            torch.cuda.synchronize()
        assert out.shape[1] == token_ids.shape[1] + new
        return time.perf_counter() - started
