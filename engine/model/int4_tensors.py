"""Read linears in 4 bits as GPTQ, AWQ and compressed-tensors store them.

All become one layout, `kernels.int4.Int4Matrix`, without rounding:

    gptq    qweight [K / 8, N]: eight rows in one int32; qzeros [G, N / 8], one too small in the
            first version of the format; scales [G, N]; g_idx [K], the group of each row
    awq     qweight [K, N / 8]: columns 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up; qzeros
            [G, N / 8] alike; scales [G, N]
    packed  compressed-tensors: weight_packed [N, K / 8]; weight_scale [N, G]; weight_zero_point
            [N / 8, G], where there is one; weight_shape
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.errors import UnsupportedModel
from engine.model.quantization import Int4Scheme
from kernels.int4 import PACKED, Int4Matrix, pack_int4, unpack_int4

#: Takes a tensor by name: (name, shape, dtypes) -> the tensor; raises UnsupportedModel.
Take = Callable[[str, tuple[int, ...], tuple[torch.dtype, ...]], torch.Tensor]

_INTS = (torch.int32,)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MIDDLE = 8  # the zero where none is stored


def read_int4(
    scheme: Int4Scheme, module: str, height: int, width: int, take: Take, has: Callable[[str], bool]
) -> Int4Matrix:
    """Return a linear's weight [height, width]; raise UnsupportedModel naming what does not fit."""
    group = scheme.group or width
    if width % group or group % PACKED or height % PACKED:
        raise UnsupportedModel(
            f"{module} has {height} rows of {width}: groups of {group} and eight numbers in an "
            "int32 do not divide them",
            param=module,
        )
    groups = width // group
    if scheme.layout == "packed":
        return _read_packed(scheme, module, (height, width, groups), take)
    scale = _scale(f"{module}.scales", (groups, height), take)
    zeros = take(f"{module}.qzeros", (groups, height // PACKED), _INTS)
    if scheme.layout == "gptq":
        packed = take(f"{module}.qweight", (width // PACKED, height), _INTS).T.contiguous()
        zero = unpack_int4(zeros) + int(scheme.less_one)
        if has(f"{module}.g_idx"):
            _check_order(f"{module}.g_idx", take(f"{module}.g_idx", (width,), _INTS), group)
    else:
        stored = take(f"{module}.qweight", (width, height // PACKED), _INTS)
        packed = pack_int4(_awq_order(unpack_int4(stored)).T)
        zero = _awq_order(unpack_int4(zeros))
    return Int4Matrix(packed, scale, zero)


def _read_packed(
    scheme: Int4Scheme, module: str, sizes: tuple[int, int, int], take: Take
) -> Int4Matrix:
    height, width, groups = sizes
    shape = take(f"{module}.weight_shape", (2,), (torch.int64, torch.int32))
    if shape.tolist() != [height, width]:
        raise UnsupportedModel(
            f"{module}.weight_shape is {shape.tolist()}, not {[height, width]}",
            param=f"{module}.weight_shape",
        )
    packed = take(f"{module}.weight_packed", (height, width // PACKED), _INTS)
    scale = _scale(f"{module}.weight_scale", (height, groups), take).T.contiguous()
    zero = torch.full(scale.shape, _MIDDLE, dtype=torch.uint8)
    if scheme.has_zeros:
        stored = take(f"{module}.weight_zero_point", (height // PACKED, groups), _INTS)
        zero = unpack_int4(stored.T.contiguous())
    return Int4Matrix(packed, scale, zero)


def _scale(name: str, shape: tuple[int, ...], take: Take) -> torch.Tensor:
    """Take scales; AutoRound writes some below zero, which multiply as others do."""
    scale = take(name, shape, _SCALES)
    if not bool((scale.isfinite() & (scale != 0)).all()):
        raise UnsupportedModel(
            f"tensor {name} has a scale that is zero or not a number", param=name
        )
    return scale


def _awq_order(numbers: torch.Tensor) -> torch.Tensor:
    """Columns from the lowest bits up -> columns in order; [*, N]."""
    parts = numbers.view(len(numbers), -1, PACKED)
    ordered = torch.empty_like(parts)
    ordered[..., list(_AWQ_ORDER)] = parts
    return ordered.flatten(1)


def _check_order(name: str, groups: torch.Tensor, size: int) -> None:
    if not torch.equal(groups.long(), torch.arange(len(groups)) // size):
        raise UnsupportedModel(
            f"tensor {name} has columns in another order: quantise with desc_act false", param=name
        )
