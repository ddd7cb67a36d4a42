"""Stops a kernel in Triton's interpreter where it reaches past the tensors it was given.

On a card such an access ends the process, or goes unseen; the interpreter reads whatever lies
there. Each address that a load, a store or an atomic really uses, those not masked, has to lie in
one of the launch's tensors: within what the tensor's shape and strides span, not its storage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

# Of the interpreter's operations: where the mask is among the arguments after the pointers.
_MASKS = {"create_masked_load": 0, "create_masked_store": 1}


class OutOfBounds(AssertionError):
    """A kernel used an address outside of its tensors."""


def watch(patch: pytest.MonkeyPatch) -> None:
    """Check every launch until the patch is undone."""
    spans: list[tuple[int, int]] = []
    launch = interpreter.GridExecutor.__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        spans[:] = sorted({*_spans([*args, *kwargs.values()])})
        launch(self, *args, **kwargs)

    def check(pointers: Any, mask: Any) -> None:
        # Of a tensor descriptor the mask is a plain array.
        used = mask if isinstance(mask, np.ndarray) else mask.data
        used = np.broadcast_to(used.astype(bool), pointers.data.shape)
        addresses = pointers.data[used].astype(np.int64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        outside = np.ones(addresses.shape, bool)
        for low, high in spans:
            outside &= (addresses < low) | (addresses + size > high)
        if outside.any():
            raise OutOfBounds(f"{outside.sum()} of {outside.size} addresses are in no tensor")

    patch.setattr(interpreter.GridExecutor, "__call__", watched)
    builder = interpreter.InterpreterBuilder
    for name, place in _MASKS.items():
        patch.setattr(builder, name, _checked(getattr(builder, name), check, place))
    atomic = builder.create_atomic_rmw

    def checked_atomic(self: Any, operation: Any, pointers: Any, *rest: Any) -> Any:
        check(pointers, rest[1])
        return atomic(self, operation, pointers, *rest)

    patch.setattr(builder, "create_atomic_rmw", checked_atomic)


def _checked(operation: Any, check: Any, place: int) -> Any:
    def checked(self: Any, pointers: Any, *rest: Any, **options: Any) -> Any:
        check(pointers, rest[place])
        return operation(self, pointers, *rest, **options)

    return checked


def _spans(arguments: list[Any]) -> Iterator[tuple[int, int]]:
    """The addresses [low, high) of each tensor."""
    for argument in arguments:
        tensor = getattr(argument, "base", argument)  # a descriptor's
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            length = 1 + sum((size - 1) * stride for size, stride in steps)
            low = tensor.data_ptr()
            yield low, low + length * tensor.element_size()
