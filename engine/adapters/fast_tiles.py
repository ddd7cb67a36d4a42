"""Copies tensors that need no arithmetic into their tiles: those of most adapters.

A loader thread competes with the step loop for Python's global interpreter lock at every call. So
this makes no torch tensors: it makes a few calls for a matrix, and the copies release the lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from contract.adapters.safetensors_header import Tensor
from engine.adapters.host_values import Bits, bits, bits_are_finite, write_bits
from engine.adapters.plan import AdapterPlan
from engine.adapters.tiles import TileMap

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_plain(
    packed: torch.Tensor,
    plan: AdapterPlan,
    tiles: TileMap,
    tensors: Mapping[str, Tensor],
    body: memoryview,
    body_begin: int,
) -> AdapterPlan:
    """Write what needs no arithmetic to `packed`; return the plan of the rest for `fill_tiles`.

    tensors     by name, as the checked header describes them
    body        the file's bytes from `body_begin` on, where its header ends

    Everything is left if a dtype differs, a tensor is not aligned or a value is not finite.
    """
    size, wanted = packed.element_size(), _DTYPE_NAMES[packed.dtype]
    if any(t.dtype != wanted or (t.begin - body_begin) % size for t in tensors.values()):
        return plan
    flat = bits(packed).reshape(-1)
    content = np.frombuffer(body, flat.dtype)
    if not bits_are_finite(content, packed.dtype):
        return plan

    def matrix(name: str) -> Bits:
        _, _, shape, begin, end = tensors[name]
        return content[(begin - body_begin) // size : (end - body_begin) // size].reshape(shape)

    left = []
    for target in plan.targets:
        is_part = target.rows is not None or target.num_stacked > 1
        if target.magnitude is not None or target.bias is not None or is_part:
            left.append(target)
            continue
        place = tiles.entry(target.site)
        rows = tiles.rows[place].tolist()
        write_bits(flat, tiles.a_offset[place].tolist(), rows, matrix(target.a_name))
        write_bits(flat, tiles.b_offset[place].tolist(), rows, matrix(target.b_name).T)
    return replace(plan, targets=tuple(left))
