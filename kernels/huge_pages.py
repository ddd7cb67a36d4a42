"""Memory from the system: in huge pages, and as late as it is used."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_HUGE_PAGE_BYTES = 2 << 20
# The largest piece that glibc's malloc learns from (DEFAULT_MMAP_THRESHOLD_MAX), with its header.
_LARGEST_LESSON = (32 << 20) - 8192


def empty_fp32(*shape: int) -> torch.Tensor:
    """An uninitialised fp32 tensor on the CPU, in huge pages where the system gives them.

    In pages of 4 KiB, finding their places takes a fifth of the time that reading them does, and
    writing them for the first time five times as long as the writing.
    """
    num_bytes = 4 * math.prod(shape)
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape)
    return _mapped(num_bytes).view(torch.float32).view(shape)


def lazy_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of zeros on the CPU; what was never written to takes no memory.

    `torch.zeros` writes all of it at once.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    return _mapped(num_bytes).view(dtype).view(shape)


def _mapped(num_bytes: int) -> torch.Tensor:
    """Fresh memory as [num_bytes] uint8, in huge pages where the system gives them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def keep_freed_memory() -> None:
    """Have malloc keep up to 64 MiB that are free, for the whole process.

    A prefill's temporaries are pieces of some megabytes. At first glibc takes each from the system
    and gives it back, and clearing its pages takes as long as a fifth of the step. Freeing a piece
    tells malloc that such pieces come and go: from then on it keeps smaller ones, and twice as
    much on top of its heap (mallopt(3), M_MMAP_THRESHOLD). This one is never written to. Other
    allocators take no notice.
    """
    torch.empty(_LARGEST_LESSON, dtype=torch.uint8)
