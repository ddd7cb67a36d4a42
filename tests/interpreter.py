"""Triton's interpreter without the work whose result it throws away: twice as fast.

It computes what the interpreter of Triton 3.7 computes. On a machine without a GPU, half of the
time of tests/engine and tests/kernels is spent in it.
"""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
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
    core._unwrap_if_constexpr = _unwrap
    interpreter.TensorHandle.__post_init__ = _check_nothing
    interpreter.InterpreterBuilder.binary_op = _binary_op
    interpreter.TritonSemantic.binary_op_type_checking_impl = _checked
    interpreter.TritonSemantic.broadcast_impl_value = _broadcast_value
    interpreter.TritonSemantic.cast = _cast
    interpreter._convert_float = _convert_float


_original_convert_float = interpreter._convert_float


def _convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """As the original, but rounded to E4M3 as a card does: that loses a carry (127 becomes 64)."""
    if target != core.float8e4nv:
        return _original_convert_float(data, source, target, rounding)
    assert source in (core.float32, core.float16)
    wide = torch.from_numpy(np.ascontiguousarray(data).astype(np.float32))
    return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


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
        _builtins[owner] = [(name, _bound(each)) for name, each in members if core.is_builtin(each)]
    for name, member in _builtins[owner]:
        scope.set_attr(owner, name, member)


#: Of what `core.builtin` puts around a function.
_BUILTIN_CODE = core.builtin(_get_np_dtype).__code__


def _bound(member: Any) -> Any:
    """As `interpreter._patch_attr` makes it, without what asks whether a kernel is the caller."""
    is_check = member.__code__ is _BUILTIN_CODE
    function = member.__wrapped__ if is_check else member

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call


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


_original_unwrap = core._unwrap_if_constexpr
_LISTS = {list, tuple, core.tuple}


def _unwrap(value: Any) -> Any:
    """As the original, which asks first whether it is one of three kinds of lists."""
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return _original_unwrap(value) if kind in _LISTS else value


def _check_nothing(_: Any) -> None:
    """In place of a check of the interpreter's own arrays."""


_item_bytes: dict[str, int] = {}


def _binary_op(builder: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    """As the original; the bytes of a type are found once."""
    output = op(lhs.data, rhs.data)
    dtype = lhs.dtype.scalar
    if not isinstance(dtype, core.pointer_type):
        if (most := _item_bytes.get(dtype.name)) is None:
            most = _item_bytes[dtype.name] = max(8, dtype.primitive_bitwidth) // 8
        if output.itemsize > most:
            output = output.astype(_get_np_dtype(dtype))
    return interpreter.TensorHandle(output, dtype)


_original_checked = interpreter.TritonSemantic.binary_op_type_checking_impl
#: Types of numbers, and of those what is added to pointers.
_OFFSETS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_PLAIN = {*_OFFSETS, "int1", "fp16", "bf16", "fp32", "fp64"}
_constants: dict[Any, Any] = {}
_MAX_CONSTANTS = 10_000
#: By the shapes of two blocks: whether the first, or the second, has that of the result.
_wholes: dict[tuple[int, int], tuple[bool, bool]] = {}


def _checked(
    semantic: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:
    """As the original, for numbers and for tensors of numbers, or of pointers with their offsets.

    A smaller operand is not copied to the shape of the other one: NumPy broadcasts it.
    """
    rules = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
    if type(lhs) is core.tensor and type(rhs) is core.tensor:
        left, right = lhs.dtype, rhs.dtype
        if left.name in _PLAIN and right.name in _PLAIN:
            if arithmetic_check:
                common = _common_type(semantic, left, right, div_or_mod)
                lhs, rhs = semantic.cast(lhs, common), semantic.cast(rhs, common)
            return _broadcast(semantic, lhs, rhs)
        if allow_lhs_ptr and left.name not in _PLAIN and right.name in _OFFSETS:
            return _broadcast(semantic, lhs, rhs)
    elif type(lhs) is core.tensor and type(rhs) in (int, float):
        key = (rhs, type(rhs), lhs.dtype.name, id(lhs.shape), rules, False)
        if (known := _constants.get(key)) is not None:
            return lhs, _constant(known)
        left, right = _original_checked(semantic, lhs, rhs, *rules)
        if left is lhs:
            _keep(key, right)
        return left, right
    elif type(rhs) is core.tensor and type(lhs) in (int, float):
        key = (lhs, type(lhs), rhs.dtype.name, id(rhs.shape), rules, True)
        if (known := _constants.get(key)) is not None:
            return _constant(known), rhs
        left, right = _original_checked(semantic, lhs, rhs, *rules)
        if right is rhs:
            _keep(key, left)
        return left, right
    left, right = _original_checked(semantic, lhs, rhs, *rules)
    return left, right


def _constant(known: tuple[Any, Any]) -> Any:
    data, type = known
    return core.tensor(interpreter.TensorHandle(data, type.scalar), type)


def _keep(key: Any, constant: Any) -> None:
    if len(_constants) < _MAX_CONSTANTS:
        _constants[key] = constant.handle.data.flat[0:1], constant.type


_common_types: dict[tuple[str, str, bool], Any] = {}


def _common_type(semantic: Any, left: Any, right: Any, div_or_mod: bool) -> Any:
    key = left.name, right.name, div_or_mod
    if key not in _common_types:
        _common_types[key] = semantic.computation_type_impl(left, False, right, False, div_or_mod)
    return _common_types[key]


def _broadcast(semantic: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    key = id(lhs.shape), id(rhs.shape)  # of objects that `_shapes` keeps
    if (wholes := _wholes.get(key)) is None:
        left, right = semantic.broadcast_impl_value(lhs, rhs)
        wholes = _wholes[key] = left.shape is lhs.shape, right.shape is rhs.shape
    is_left_whole, is_right_whole = wholes
    if is_left_whole:
        return lhs, core.tensor(rhs.handle, lhs.type.with_element_ty(rhs.dtype))
    if is_right_whole:
        return core.tensor(lhs.handle, rhs.type.with_element_ty(lhs.dtype)), rhs
    left, right = semantic.broadcast_impl_value(lhs, rhs)
    return left, right


_original_broadcast_value = interpreter.TritonSemantic.broadcast_impl_value


def _broadcast_value(semantic: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """As the original, which compares shapes number by number."""
    if lhs.shape is rhs.shape:
        return lhs, rhs
    left, right = _original_broadcast_value(semantic, lhs, rhs)
    return left, right


_original_cast = interpreter.TritonSemantic.cast


def _cast(semantic: Any, value: Any, to: Any, rounding: str | None = None) -> Any:
    """As the original, which compares types that are mostly the same object."""
    return value if value.dtype is to else _original_cast(semantic, value, to, rounding)
