"""Find NaN and infinity among the values of a safetensors file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from contract.adapters.safetensors_header import DTYPE_BYTES, Tensor

_SCAN_BYTES = 1 << 20  # a multiple of every dtype's size


def tensors_with_nonfinite(file: BinaryIO, tensors: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Yield the tensors that contain a NaN or an infinity.

    The exponent bits of both are all ones."""
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


# Both tests use `translate` on all high bytes at once, which costs about as much as reading them; a
# loop over the numbers would take minutes for a large file.
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
    # The exponent's last bit is the first bit of the next byte; its other seven bits are all ones
    # in a finite number near 1e38, too.
    after = piece[step - 2 :: step]
    both = int.from_bytes(high.translate(_IS_F32_HIGH)) & int.from_bytes(
        after.translate(_IS_F32_NEXT)
    )
    return both != 0
