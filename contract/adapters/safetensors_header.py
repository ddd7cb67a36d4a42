"""Read the header of a safetensors file without trusting it.

The file is: 8 bytes, the header's length as a little-endian integer; the header, a JSON object
{name: {"dtype", "shape", "data_offsets": [begin, end]}}; the tensors' bytes, to which the offsets
refer. Nothing is unpickled, and no size that the file claims is allocated.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any, NamedTuple

from contract.adapters.file_kinds import other_kind
from contract.adapters.problems import AdapterProblems, Problem, shown
from contract.strict_json import read_object

FILE = "adapter_model.safetensors"
#: The format allows 100 MB; an adapter of 128 layers has a header of about 200 kB.
ENGINE_MAX_BYTES = 16 << 20
UPLOAD_MAX_BYTES = 4 << 20
LENGTH_BYTES = 8

DTYPE_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
_MAX_DIMENSIONS = 8
_MAX_DIMENSION = 1 << 31


class Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # offset of the first byte from the start of the file
    end: int


def header_length(start: bytes, file_bytes: int, max_bytes: int) -> int:
    """Return the header's length from the file's first bytes, 8 or more of them.

    Raises AdapterProblems if this is no safetensors file, or the length is impossible.
    """
    if len(start) < LENGTH_BYTES or file_bytes < LENGTH_BYTES:
        raise _bad(_other_kind(start) or "it is too short for a safetensors file")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    # Checked only now: a valid file begins with its header's length, and a pickle also begins with
    # 640.
    if length > max_bytes:
        raise _bad(
            _other_kind(start)
            or f"its header claims {length} bytes, more than the {max_bytes} allowed: "
            "it is damaged or not a safetensors file"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise _bad(_other_kind(start) or "it ends inside its header: it is truncated")
    return length


def _other_kind(start: bytes) -> str | None:
    """Return a description of another kind of file, and what to do; None if unknown."""
    if start.startswith(b"{"):
        return "it is a JSON file: save the adapter with safe_serialization=True"
    return other_kind(start)


def read_header(start: bytes, file_bytes: int, max_bytes: int) -> tuple[Tensor, ...]:
    """Return the tensors in the order of their bytes, which fill the file without gap or overlap.

    start       the file from its beginning to the end of the header or further
    file_bytes  the length of the whole file
    max_bytes   of the header
    Raises AdapterProblems.
    """
    length = header_length(start, file_bytes, max_bytes)
    text = start[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(text) < length or not text.startswith(b"{"):
        raise _bad("its header is not a JSON object: it is damaged or not a safetensors file")
    try:
        entries = read_object(text)
    except ValueError as error:
        raise _bad(f"its header {error}") from error
    _check_metadata(entries.pop("__metadata__", {}))
    if not entries:
        raise _bad("it contains no tensor")
    data_begin = LENGTH_BYTES + length
    tensors = sorted(
        (_tensor(name, entry, data_begin) for name, entry in entries.items()),
        key=attrgetter("begin", "end"),
    )
    expected = data_begin
    for tensor in tensors:
        if tensor.begin != expected:
            problem = "overlaps the tensor before it" if tensor.begin < expected else "leaves a gap"
            raise _bad(f"its data_offsets are wrong: it {problem} in the file", tensor.name)
        expected = tensor.end
    if expected != file_bytes:
        problem = "truncated" if expected > file_bytes else "followed by other bytes"
        raise _bad(
            f"its header describes {expected} bytes, the file has {file_bytes}: it is {problem}"
        )
    return tuple(tensors)


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad("its __metadata__ is not an object of strings")


def _tensor(name: str, entry: Any, data_begin: int) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _bad("its header entry needs dtype, shape and data_offsets", name)
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _bad(f"its dtype {shown(dtype)} is not supported: use F16, BF16 or F32", name)
    shape = _integers(name, "shape", entry["shape"], 1, _MAX_DIMENSION)
    offsets = _integers(name, "data_offsets", entry["data_offsets"], 0, 1 << 62)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad("its data_offsets are not a begin and an end", name)
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        size = end - begin
        raise _bad(
            f"it has {size} bytes, which its shape {list(shape)} of {dtype} does not need", name
        )
    return Tensor(name, dtype, shape, data_begin + begin, data_begin + end)


def _integers(name: str, what: str, values: Any, low: int, high: int) -> tuple[int, ...]:
    is_good = (
        isinstance(values, list)
        and len(values) <= _MAX_DIMENSIONS
        and all(type(value) is int and low <= value <= high for value in values)
    )
    if not is_good:
        raise _bad(f"its {what} {shown(values)} is not a list of sizes", name)
    return tuple(values)


def _bad(message: str, tensor: str = "") -> AdapterProblems:
    return AdapterProblems([Problem(FILE, shown(tensor), message)])
