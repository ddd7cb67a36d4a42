"""DeltaInputs: a step's sequences, and where the numbers of their states lie in the arena.

A sequence's states are one row of fp32 numbers, cut into pages (engine/model/delta_states.py). A
layer's first are the convolution's last inputs, the rest are its heads' matrices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.backend import jit, tl
from kernels.delta import DeltaShape


class DeltaInputs(NamedTuple):
    """A step's sequences and their pages, which all layers read.

    query_start  [S + 1] int32
    token_row    [T] int32 the sequence of each token; S: padding
    read, write  [S, pages] int64; -1: the state is zero, or written nowhere
    chunk_row    [C] int32 the sequence of each chunk of a prompt; -1: padding. None: all are
                 decodes
    chunk_start  [C] int32 the chunk's first token
    """

    query_start: torch.Tensor
    token_row: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    chunk_row: torch.Tensor | None = None
    chunk_start: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.read)

    @property
    def num_pages(self) -> int:
        return self.read.shape[1]


class Projected(NamedTuple):
    """A layer's inputs: what was projected [T, sum of widths], and what adapters add to it."""

    base: torch.Tensor
    delta: torch.Tensor | None = None


def make_inputs(
    query_start: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    num_tokens: int,
    chunk: int | None,
) -> DeltaInputs:
    """Assign tokens and chunks to sequences; nothing waits for the device.

    chunk  tokens of a prompt that are computed together; None: all sequences have one token
    """
    device, num_rows = query_start.device, len(read)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device)
    if chunk is None:
        return DeltaInputs(query_start, tokens, read, write)
    row = torch.searchsorted(query_start[1:], tokens, right=True, out_int32=True)
    lengths = query_start.diff()
    counts = torch.where(lengths > 1, (lengths + chunk - 1) // chunk, 0)
    after = counts.cumsum(0, dtype=torch.int32)
    most = num_tokens // chunk + min(num_rows, num_tokens // 2)
    chunks = torch.arange(most, dtype=torch.int32, device=device)
    chunk_row = torch.searchsorted(after, chunks, right=True, out_int32=True)
    known = chunk_row.clamp(max=num_rows - 1)
    start = query_start[known] + (chunks - (after - counts)[known]) * chunk
    chunk_row = torch.where(chunk_row < num_rows, chunk_row, -1)
    return DeltaInputs(query_start, row, read, write, chunk_row, start)


def is_aligned(shape: DeltaShape, page: int) -> bool:
    """Return whether a head's matrix lies in two pages at most, and each of its rows in one."""
    width = shape.value_dim
    sizes = page, shape.state_size, shape.window[0] * shape.window[1]
    is_short = shape.key_dim * width <= page
    return is_short and width % 4 == 0 and all(size % width == 0 for size in sizes)


@jit()
def place_of(pages_ptr, number, mask, PAGE: tl.constexpr):
    """Return where numbers of a state lie in the arena, int64; -1: nowhere."""
    page = tl.load(pages_ptr + number // PAGE, mask=mask, other=-1)
    return tl.where(page >= 0, page * PAGE + number % PAGE, -1)


@jit()
def matrix_places(
    pages_ptr,
    first,
    k,
    v,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PAGE: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Return where a head's matrix [k, v] lies in the arena, and which of its numbers are there."""
    inside = (k < DK)[:, None] & (v < DV)[None, :]
    if IS_ALIGNED:  # so that a row's numbers are loaded together, with few addresses in registers
        page = tl.load(pages_ptr + first // PAGE)
        next_page = tl.load(pages_ptr + (first + DK * DV - 1) // PAGE)
        row = first % PAGE + k * DV
        row = tl.where(row < PAGE, page * PAGE, next_page * PAGE - PAGE) + row
        place = tl.multiple_of(row, 4)[:, None] + v[None, :]
        live = inside & (page >= 0)
    else:
        place = place_of(pages_ptr, first + k[:, None] * DV + v[None, :], inside, PAGE)
        live = place >= 0
    return place, live


@jit()
def projected(base_ptr, delta_ptr, place, mask, HAS_DELTA: tl.constexpr):
    """Load what was projected, with what adapters add to it, fp32."""
    x = tl.load(base_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return x


@jit()
def rates_of(
    base_ptr,
    delta_ptr,
    place,
    mask,
    rate_ptr,
    shift_ptr,
    head,
    HV: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Return tokens' decays g and rates beta of a head; place: of their rates, head 0."""
    beta = tl.sigmoid(projected(base_ptr, delta_ptr, place + head, mask, HAS_DELTA))
    x = projected(base_ptr, delta_ptr, place + HV + head, mask, HAS_DELTA)
    x += tl.load(shift_ptr + head).to(tl.float32)
    soft = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return -tl.exp(tl.load(rate_ptr + head).to(tl.float32)) * soft, beta
