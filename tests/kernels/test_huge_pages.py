"""Tensors over memory of their own."""

import platform
import subprocess
import sys

import pytest
import torch

from kernels.huge_pages import empty_fp32


@pytest.mark.parametrize("shape", [(5, 7), (3, 1 << 19)])
def test_holds_what_is_written_after_its_last_view_is_made(shape: tuple[int, ...]) -> None:
    tensor = empty_fp32(*shape)
    assert tensor.shape == shape
    assert tensor.dtype == torch.float32
    row = tensor.fill_(1.0)[-1]
    del tensor
    assert row.sum() == shape[-1]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="says how glibc's malloc behaves")
def test_temporaries_of_some_megabytes_are_cleared_once() -> None:
    """In a process of its own: what malloc has learnt, it does not forget."""
    program = """
import resource, torch
from kernels.huge_pages import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (1, 3, 7, 12):
        torch.empty(size << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
before = faults()
keep_freed_memory()
faults()
print(before, faults())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    before, after = map(int, run.stdout.split())
    assert before > 1000  # of 5888, less what the first rounds have taught
    assert after < 50
