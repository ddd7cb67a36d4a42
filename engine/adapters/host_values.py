"""Checks and copies values in host memory, on one core for each loader thread.

It uses numpy: torch would start a team of threads for every loader thread, which would compete with
the engine for the cores. Laying out an adapter then took 50 ms on a busy engine instead of 15.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

# Values seen as unsigned integers of the same width.
Bits = npt.NDArray[Any]

_INTS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
# Bits of infinity without the sign: infinities and NaNs have these bits or a larger number.
_INFINITY = {torch.float32: 0x7F80_0000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_PIECE = 1 << 18


def bits(values: torch.Tensor) -> Bits:
    """View a CPU tensor's values as unsigned integers of the same width, without a copy."""
    signed = {2: torch.int16, 4: torch.int32}.get(values.element_size(), torch.uint8)
    return values.view(signed).numpy().view(_INTS[values.element_size()])


def clear(values: torch.Tensor) -> None:
    """Set all values to zero, in place."""
    bits(values).fill(0)


def are_finite(values: torch.Tensor) -> bool:
    """Return whether no value is infinite or NaN; reads contiguous `values` once."""
    return bits_are_finite(bits(values.view(-1)), values.dtype)


def bits_are_finite(flat: Bits, dtype: torch.dtype) -> bool:
    """Return whether no value is infinite or NaN, given the `bits` of values of `dtype`."""
    scratch = np.empty(min(_PIECE, flat.size), flat.dtype)
    magnitude = flat.dtype.type((1 << (8 * flat.itemsize - 1)) - 1)
    for first in range(0, flat.size, _PIECE):
        piece = flat[first : first + _PIECE]
        found = np.bitwise_and(piece, magnitude, out=scratch[: piece.size])
        if int(found.max()) >= _INFINITY[dtype]:
            return False
    return True


def write_rows(
    flat: torch.Tensor, offsets: Sequence[int], counts: Sequence[int], matrix: torch.Tensor
) -> None:
    """Write the rows of `matrix` to `flat`: the first `counts[0]` at `offsets[0]`, and so on.

    Rows that end up side by side are written in one copy. A count of 0 ends the list.
    """
    if matrix.dtype == flat.dtype and matrix.device == flat.device:
        write_bits(bits(flat), offsets, counts, bits(matrix))
        return
    width, first = matrix.shape[1], 0
    for offset, count in _joined(offsets, counts, width):
        place = flat[offset : offset + count * width].view(count, width)
        place.copy_(matrix[first : first + count])
        first += count


def write_bits(flat: Bits, offsets: Sequence[int], counts: Sequence[int], matrix: Bits) -> None:
    """Do `write_rows` on the `bits` of two tensors of one dtype."""
    width, first = matrix.shape[1], 0
    for offset, count in _joined(offsets, counts, width):
        place = flat[offset : offset + count * width].reshape(count, width)
        np.copyto(place, matrix[first : first + count])
        first += count


def _joined(offsets: Sequence[int], counts: Sequence[int], width: int) -> Iterable[tuple[int, int]]:
    start = total = 0
    for offset, count in zip(offsets, counts, strict=True):
        if not count:
            break
        if total and offset == start + total * width:
            total += count
            continue
        if total:
            yield start, total
        start, total = offset, count
    if total:
        yield start, total
