"""The quick way into the tiles for tensors that are applied as the file has them: most adapters'.

A loader thread competes with the step loop for Python's lock at every call. So nothing is made a
torch tensor here: a handful of calls for a matrix, and the copies themselves hold no lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.adapters.host_values import Bits, bits, bits_are_finite, write_bits
from engine.adapters.plan import AdapterPlan
from engine.adapters.tiles import TileMap
from kernels import NUM_PROJECTIONS

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_plain(
    packed: torch.Tensor,
    plan: AdapterPlan,
    tiles: TileMap,
    entries: Mapping[str, Any],
    body: memoryview,
) -> AdapterPlan:
    """Write what needs no arithmetic to `packed`; the plan of what is left for `fill_tiles`.

    entries, body  the header of the safetensors file, checked, and what follows it

    Everything is left where dtypes differ or a value is not finite.
    """
    size, wanted = packed.element_size(), _DTYPE_NAMES[packed.dtype]
    if any(e["dtype"] != wanted or e["data_offsets"][0] % size for e in entries.values()):
        return plan
    flat = bits(packed).reshape(-1)
    content = np.frombuffer(body, flat.dtype)
    if not bits_are_finite(content, packed.dtype):
        return plan

    def matrix(name: str) -> Bits:
        entry = entries[name]
        first, end = entry["data_offsets"]
        return content[first // size : end // size].reshape(entry["shape"])

    left = []
    for target in plan.targets:
        if target.magnitude is not None or target.bias is not None:
            left.append(target)
            continue
        place = target.layer * NUM_PROJECTIONS + target.projection
        rows = tiles.rows[place].tolist()
        write_bits(flat, tiles.a_offset[place].tolist(), rows, matrix(target.a_name))
        write_bits(flat, tiles.b_offset[place].tolist(), rows, matrix(target.b_name).T)
    return replace(plan, targets=tuple(left))
