"""Tensors over memory of their own."""

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
