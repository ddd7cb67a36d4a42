"""Copies a step's host arrays to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_DTYPES = {
    "bool": torch.bool, "int32": torch.int32, "int64": torch.int64, "float32": torch.float32,
}  # fmt: skip
# Parts of one copy begin at multiples of this, so that a kernel may read them in wide words.
_ALIGNMENT = 16


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device | str) -> list[torch.Tensor]:
    """Copy the arrays to the device at once; the host waits for nothing.

    A copy from memory that is not pinned would wait for all earlier work of the device.
    """
    if torch.device(device).type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays])
    # Memory from torch's cache: nothing is pinned again, and nothing is reused before it was
    # copied.
    staged = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    host, spans = staged.numpy(), []
    for array, end in zip(arrays, ends.tolist(), strict=True):
        start = end - -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        spans.append((start, start + array.nbytes))
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    on_device = staged.to(device, non_blocking=True)
    return [
        on_device[start:end].view(_DTYPES[array.dtype.name]).view(array.shape)
        for array, (start, end) in zip(arrays, spans, strict=True)
    ]
