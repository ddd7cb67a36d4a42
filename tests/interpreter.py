"""Triton's interpreter without the work whose result it throws away: twice as fast.

It computes what the interpreter of Triton 3.7 computes. On a machine without a GPU, half of the
time of tests/engine and tests/kernels is spent in it.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def speed_up() -> None:
    """Patch the interpreter, once for the process."""
    # Each sum and product of integers is computed again in 64 bits to assert that it fits. The
    # interpreter is never in its debug mode, in which alone it looks at the assertion.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _get_np_dtype
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_lang
    interpreter.InterpretedFunction.__call__ = _call_device_function
    core.block_type.__init__ = _init_block_type
    core.tensor.__init__ = _init_tensor


_original_np_dtype = interpreter._get_np_dtype
_POINTER = _original_np_dtype(core.pointer_type(core.int8))
_np_dtypes: dict[str, Any] = {}


def _get_np_dtype(dtype: Any) -> Any:
    """As the original, which makes a table of all types for each question."""
    if isinstance(dtype, core.block_type):
        dtype = dtype.element_ty
    if isinstance(dtype, core.pointer_type):
        return _POINTER
    if (found := _np_dtypes.get(dtype.name)) is None:
        found = _np_dtypes[dtype.name] = _original_np_dtype(dtype)
    return found


_builtins: dict[ModuleType | type, list[tuple[str, Any]]] = {}


def _patch_builtin(owner: ModuleType | type, builder: Any, scope: Any) -> None:
    """As the original, which looks through the owner's members at each launch."""
    if owner not in _builtins:
        members = interpreter.inspect.getmembers(owner)
        _builtins[owner] = [(name, each) for name, each in members if core.is_builtin(each)]
    for name, member in _builtins[owner]:
        interpreter._patch_attr(owner, name, member, builder, scope)


_original_patch_lang = interpreter._patch_lang
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": core})


def _patch_lang(_: Any) -> Any:
    """Patch what a kernel sees of the language, and what the functions that it calls see of it."""
    return _original_patch_lang(_LANGUAGE)


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """As the original, which patches the language again at each call."""
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_original_init_block_type = core.block_type.__init__
_block_types: dict[Any, tuple[Any, int, str]] = {}


def _init_block_type(block: Any, element_ty: Any, shape: Any) -> None:
    """As the original, which checks and prints the same few shapes again and again."""
    sizes = tuple(each.value if isinstance(each, core.constexpr) else each for each in shape)
    key = (element_ty.name, sizes)
    if key not in _block_types:
        _original_init_block_type(block, element_ty, shape)
        _block_types[key] = (block.shape, block.numel, block.name)
    block.element_ty = element_ty
    block.shape, block.numel, block.name = _block_types[key]


_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}


def _init_tensor(tensor: Any, handle: Any, type: Any) -> None:
    """As the original, which makes the same few shapes again and again."""
    sizes = tuple(type.shape) if type.is_block() else ()
    if (found := _shapes.get(sizes)) is None:
        shape = core.tuple([core.constexpr(size) for size in sizes])
        found = _shapes[sizes] = (shape, core.constexpr(math.prod(sizes)))
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    tensor.shape, tensor.numel = found
