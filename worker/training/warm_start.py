"""The adapter that a job begins from, read for the batch."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from contract.adapters.draft_heads import is_head_tensor
from contract.training.job import JobError
from engine.training.parameters import AdapterLayout

_FIELD = "warm_start"


def read_warm_start(path: Path, layout: AdapterLayout) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors in float32, as PEFT trains them.

    Names and shapes are compared with those of the run's own adapter before anything is read, so
    that no file takes more memory than that adapter. Raises JobError unless they are the same.
    """
    wanted = layout.tensors(torch.empty(layout.size, device="meta"))
    try:
        with safe_open(path, framework="pt") as file:
            names = {name for name in file.keys() if not is_head_tensor(name)}
            if strange := sorted(names ^ wanted.keys()):
                raise JobError(_FIELD, f"the adapter has other tensors than this: {strange[0]}")
            for name, tensor in wanted.items():
                shape = file.get_slice(name).get_shape()
                if shape != list(tensor.shape):
                    problem = f"{name} has shape {shape}, not {list(tensor.shape)}"
                    raise JobError(_FIELD, f"the adapter does not fit: {problem}")
            return {name: file.get_tensor(name).float() for name in wanted}
    except (OSError, SafetensorError) as error:
        raise JobError(_FIELD, f"the adapter cannot be read: {str(error)[:300]}") from error
