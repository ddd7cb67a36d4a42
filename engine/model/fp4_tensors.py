"""Read matrices in MXFP4: blocks of 32 numbers in 4 bits (E2M1), scaled by a power of two.

Source: OCP Microscaling Formats (MX) Specification v1.0.
"""

from __future__ import annotations

import torch

#: Numbers that share a scale.
FP4_GROUP = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # what is added to an exponent before it is stored


def dense_fp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """blocks [..., G, 16] uint8, the lower four bits first, scales [..., G] uint8 -> [..., 32 G]"""
    values = torch.tensor((*_POSITIVE, *(-value for value in _POSITIVE)), dtype=dtype)
    both = torch.arange(256)
    pairs = torch.stack(
        (values[both & 15], values[both >> 4]), dim=1
    )  # the two numbers in each byte
    numbers = pairs[blocks.int()].flatten(-2)  # [..., G, 32]
    return torch.ldexp(numbers, scales.int()[..., None] - _BIAS).flatten(-2)
