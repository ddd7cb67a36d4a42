"""Allocates memory on the CPU: in huge pages, or only when it is first used."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_HUGE_PAGE_BYTES = 2 << 20
# The largest block whose free() raises glibc's mmap threshold (DEFAULT_MMAP_THRESHOLD_MAX), less
# its header.
_MAX_THRESHOLD_BYTES = (32 << 20) - 8192


def empty_fp32(*shape: int) -> torch.Tensor:
    """Allocate an uninitialised fp32 tensor on the CPU, in huge pages if the system has them.

    With pages of 4 KiB, address translation adds a fifth to the time of reading, and page faults
    make the first write five times as slow.
    """
    num_bytes = 4 * math.prod(shape)
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape)
    return _mapped(num_bytes).view(torch.float32).view(shape)


def lazy_zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate zeros on the CPU; pages that were never written take no memory.

    `torch.zeros` writes all pages at once.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    return _mapped(num_bytes).view(dtype).view(shape)


def _mapped(num_bytes: int) -> torch.Tensor:
    """Allocate fresh memory as [num_bytes] uint8, in huge pages if the system has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep up to 64 MiB of free memory, for the whole process.

    A prefill's temporaries are blocks of some megabytes. By default glibc maps each block and
    unmaps it afterwards, and clearing its pages takes a fifth of the step's time. Freeing one large
    block raises the threshold: from then on malloc keeps smaller blocks, and twice as much on top
    of its heap (mallopt(3), M_MMAP_THRESHOLD). The block is never written to. Other allocators are
    not affected.
    """
    torch.empty(_MAX_THRESHOLD_BYTES, dtype=torch.uint8)
