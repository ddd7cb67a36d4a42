"""Memory that does not come from the system page by page, each cleared at its first use."""

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
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


def keep_freed_memory() -> None:
    """Have malloc keep up to 64 MiB that are free, for the whole process.

    A prefill's temporaries are pieces of some megabytes. At first glibc takes each from the system
    and gives it back, and clearing its pages takes as long as a fifth of the step. Freeing a piece
    tells malloc that such pieces come and go: from then on it keeps smaller ones, and twice as
    much on top of its heap (mallopt(3), M_MMAP_THRESHOLD). This one is never written to. Other
    allocators take no notice.
    """
    torch.empty(_LARGEST_LESSON, dtype=torch.uint8)
