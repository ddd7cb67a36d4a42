"""The matrices in E4M3 that tiles hold: one that is rounded, or two whose sum is the original.

The kernels read all tiles of an engine in one format. A number in bf16 has eight significant bits
and one in E4M3 has four, so a matrix in bf16 is the sum of two in E4M3, and (B1 + B2) (A1 + A2) the
sum of four products. An original thus takes the memory of bf16 and four times the work of its copy
in FP8; batches with both need no other kernels.
"""

from __future__ import annotations

import math

import torch

from kernels.fp8 import FP8, FP8_MAX, quantize_tensor

#: The second part's scale: what rounding to four bits leaves is a 16th at most.
_REST = 2.0**-4
#: Exponent of the scale of a matrix of zeros.
_LEAST = -40


def fp8_parts(matrix: torch.Tensor, num_parts: int) -> list[tuple[torch.Tensor, float]]:
    """Return matrices in E4M3 with their scales: a rounded one, or two that sum up to bf16's.

    Two are exact, but for numbers below a 16,000th of the largest: those are off by less than a
    four millionth of it.
    """
    if num_parts == 1:
        return [quantize_tensor(matrix)]
    wide = matrix.to(torch.bfloat16).float()
    largest = float(wide.abs().max()) / FP8_MAX
    # A power of two, as multiplying by one rounds nothing.
    scale = 2.0 ** max(_LEAST, math.ceil(math.log2(largest)) if largest else _LEAST)
    wide = (wide / scale).contiguous()
    rounded = wide.to(FP8)
    rest = ((wide - rounded.float()) / _REST).to(FP8)
    return [(rounded, scale), (rest, scale * _REST)]
