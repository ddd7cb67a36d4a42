"""Chooses an operation's implementation: Triton on a GPU, torch on a CPU.

Triton is optional: without it, `jit` returns an object that raises RuntimeError when launched. With
TRITON_INTERPRET=1 (set before this file is imported) the same kernels run on a CPU, slowly, for
tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = None
    tl = None
    TensorDescriptor = None


__all__ = [
    "TensorDescriptor",
    "ceil_div",
    "jit",
    "next_power_of_2",
    "num_launched",
    "tl",
    "triton",
    "use_triton",
]

_MOST_INTERPRETED = 8


class _MissingKernel:
    """Stands in for a Triton kernel where Triton is not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: object) -> Any:
        raise RuntimeError(f"{self.name} needs the package triton: install it")


def jit(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """Return `triton.jit`, or a stand-in that raises RuntimeError when launched.

    varying  names of integer arguments that change between launches; else Triton would compile
             again for a value of 1 and for multiples of 16
    """

    def decorate(function: Callable[..., Any]) -> Any:
        if triton is None:
            return _MissingKernel(function.__name__)
        return triton.jit(do_not_specialize=list(varying))(function)

    return decorate


def use_triton(tensor: torch.Tensor) -> bool:
    """Return whether an operation on `tensor` runs its Triton kernel."""
    return tensor.is_cuda


def num_launched(most: int, device: torch.device) -> int:
    """Return how many programs share a launch's units of work, `most` at most.

    In Triton's interpreter it is few: it runs all programs one after the other, even idle ones.
    """
    return most if device.type == "cuda" else min(most, _MOST_INTERPRETED)


def next_power_of_2(value: int) -> int:
    """Return the smallest power of two that is at least `value` and at least 1."""
    return 1 << max(value - 1, 0).bit_length()


def ceil_div(value: int, by: int) -> int:
    return -(-value // by)
