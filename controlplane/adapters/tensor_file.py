"""Read a safetensors file without trusting it: the header by hand, the values for NaN.

The file is: 8 bytes, the header's length as a little-endian integer; the header, a JSON object
{name: {"dtype", "shape", "data_offsets": [begin, end]}}; the tensors' bytes, to which the offsets
refer. Nothing is unpickled, and nothing is allocated by what the file says of itself.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any, BinaryIO

from contract.adapter_limits import CONVERT_BIN
from controlplane.adapters.rejection import Reason, Rejected, shown

FILE = "adapter_model.safetensors"
#: The format allows 100 MB; an adapter of 128 layers has a header of about 200 kB.
MAX_HEADER_BYTES = 4 * 1024 * 1024
LENGTH_BYTES = 8

DTYPE_BYTES = {"F16": 2, "BF16": 2, "F32": 4}
_MAX_DIMENSIONS = 8
_MAX_DIMENSION = 1 << 31
_SCAN_BYTES = 1 << 20  # a multiple of every dtype's size

#: How files that people upload by mistake begin.
_MAGICS = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"{", "a JSON file"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # of its bytes, from the start of the file
    end: int


def header_length(start: bytes, file_bytes: int) -> int:
    """The header's length from the file's first bytes, 8 or more of them.

    Raises Rejected when this is no safetensors file, or the length is not to be believed.
    """
    if len(start) < LENGTH_BYTES or file_bytes < LENGTH_BYTES:
        raise _rejected(_other_kind(start) or "it is too short for a safetensors file")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    # Only now: a good file begins with its header's length, and 640 is also how a pickle begins.
    if length > MAX_HEADER_BYTES:
        raise _rejected(
            _other_kind(start)
            or f"its header claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed: "
            "it is damaged or not a safetensors file"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise _rejected(_other_kind(start) or "it ends inside its header: it is truncated")
    return length


def _other_kind(start: bytes) -> str | None:
    """What the file is instead, and what to do; None: nobody knows."""
    for magic, kind in _MAGICS:
        if start.startswith(magic):
            is_torch = "torch" in kind or "pickle" in kind
            advice = CONVERT_BIN if is_torch else "save the adapter with safe_serialization=True"
            return f"it is {kind}: {advice}"
    return None


def parse_header(start: bytes, file_bytes: int) -> tuple[Tensor, ...]:
    """The tensors in the order of their bytes, which fill the file without gap or overlap.

    start       the file from its beginning to the end of the header or further
    file_bytes  the length of the whole file
    Raises Rejected.
    """
    length = header_length(start, file_bytes)
    text = start[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(text) < length or not text.startswith(b"{"):
        raise _rejected("its header is not a JSON object: it is damaged or not a safetensors file")
    entries = _loads(text)
    _check_metadata(entries.pop("__metadata__", {}))
    if not entries:
        raise _rejected("it holds no tensor")
    data_begin = LENGTH_BYTES + length
    tensors = sorted(
        (_tensor(name, entry, data_begin) for name, entry in entries.items()),
        key=lambda tensor: (tensor.begin, tensor.end),
    )
    expected = data_begin
    for tensor in tensors:
        if tensor.begin != expected:
            problem = "overlaps the tensor before it" if tensor.begin < expected else "leaves a gap"
            raise Rejected.because(
                shown(tensor.name), f"its data_offsets are wrong: it {problem} in the file"
            )
        expected = tensor.end
    if expected != file_bytes:
        problem = "truncated" if expected > file_bytes else "followed by other bytes"
        raise _rejected(
            f"its header describes {expected} bytes, the file has {file_bytes}: it is {problem}"
        )
    return tuple(tensors)


def tensors_with_nonfinite(file: BinaryIO, tensors: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """The tensors that hold a NaN or an infinity: a number whose exponent bits are all ones."""
    for tensor in tensors:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            piece = file.read(min(_SCAN_BYTES, left))
            if not piece:
                raise EOFError(f"the file ends inside {tensor.name}")
            left -= len(piece)
            if _has_nonfinite(piece, tensor.dtype):
                yield tensor
                break


# Both tests work on whole planes of bytes with `translate`, which costs about as much as reading
# them; a loop over the numbers would take minutes for a large file.
_F16_HIGH = bytes(byte for byte in range(256) if byte & 0x7C == 0x7C)
_F32_HIGH = bytes(byte for byte in range(256) if byte & 0x7F == 0x7F)
_IS_F32_HIGH = bytes(int(byte & 0x7F == 0x7F) for byte in range(256))
_IS_F32_NEXT = bytes(int(byte & 0x80 == 0x80) for byte in range(256))


def _has_nonfinite(piece: bytes, dtype: str) -> bool:
    step = DTYPE_BYTES[dtype]
    high = piece[step - 1 :: step]  # sign and exponent; numbers are little-endian
    if dtype == "F16":
        return len(high.translate(None, _F16_HIGH)) != len(high)
    if len(high.translate(None, _F32_HIGH)) == len(high):
        return False
    # The exponent's last bit is the first bit of the next byte; the other seven are all ones
    # in a finite number of 1e38 too.
    after = piece[step - 2 :: step]
    both = int.from_bytes(high.translate(_IS_F32_HIGH)) & int.from_bytes(
        after.translate(_IS_F32_NEXT)
    )
    return both != 0


def _loads(text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise _rejected("its header is nested too deeply") from error
    except ValueError as error:
        raise _rejected(f"its header is not JSON: {shown(str(error))}") from error
    if not isinstance(entries, dict):
        raise _rejected("its header is not a JSON object")
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise _rejected("its header names something twice")
    return entries


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _rejected("its __metadata__ is not an object of strings")


def _tensor(name: str, entry: Any, data_begin: int) -> Tensor:
    field = shown(name)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise Rejected.because(field, "its header entry needs dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise Rejected.because(
            field, f"its dtype {shown(dtype)} is not supported: use F16, BF16 or F32"
        )
    shape = _integers(field, "shape", entry["shape"], 1, _MAX_DIMENSION)
    offsets = _integers(field, "data_offsets", entry["data_offsets"], 0, 1 << 62)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise Rejected.because(field, "its data_offsets are not a begin and an end")
    begin, end = offsets
    if end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise Rejected.because(
            field, f"it has {end - begin} bytes, which its shape {list(shape)} of {dtype} is not"
        )
    return Tensor(
        name=name, dtype=dtype, shape=shape, begin=data_begin + begin, end=data_begin + end
    )


def _integers(field: str, what: str, values: Any, low: int, high: int) -> tuple[int, ...]:
    is_good = (
        isinstance(values, list)
        and len(values) <= _MAX_DIMENSIONS
        and all(type(value) is int and low <= value <= high for value in values)
    )
    if not is_good:
        raise Rejected.because(field, f"its {what} {shown(values)} is not a list of sizes")
    return tuple(values)


def _rejected(message: str) -> Rejected:
    return Rejected([Reason(FILE, message)])
