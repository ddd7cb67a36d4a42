"""MaskUploads: a step's masks, on their way to the logits on the device.

They are sent as bits, one for each token of the vocabulary, on a stream of their own: the copy runs
beside the pass whose logits they mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.sampler import Sampled
from kernels import apply_bitmask


class Masks(Protocol):
    """The masks of a step: `StepMasks`, or `DraftMasks` if it has drafts."""

    def fill(self, words: npt.NDArray[np.int32]) -> list[int]:
        """Write them into `words` [N or more, ceil(V / 32)]; return the rows that have one."""

    def read(self, sampled: Callable[[], list[Sampled]]) -> list[Sampled]:
        """Return the tokens, or an error for each whose mask could not be made."""


class MaskUploads:
    """Owns the buffers of two steps: of one that is computed, and of the one before.

    A step's masks are made after the tokens of the step before were read, so the buffers of the
    one before that are free.
    """

    def __init__(self, device: torch.device, max_rows: int, vocab_size: int) -> None:
        shape = (2, max_rows, -(-vocab_size // 32))
        self._device, self._shape, self._turn = device, shape, 0
        self._host: torch.Tensor | None = None  # made with the first step that has masks
        self._stream: torch.cuda.Stream | None = None

    def apply(self, logits: torch.Tensor, masks: Masks) -> None:
        """Mask in `logits` [N, V], in place; the host waits for nothing on the device."""
        if self._host is None:
            self._make_buffers()
            assert self._host is not None
        self._turn = turn = 1 - self._turn
        host = self._host[turn]
        rows = masks.fill(host.numpy())
        if not rows:
            return
        row_ids = self._host_rows[turn, : len(rows)]
        row_ids.copy_(torch.tensor(rows))
        bits, on_device = host[: rows[-1] + 1], row_ids
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                bits = self._bits[turn, : len(bits)].copy_(bits, non_blocking=True)
                on_device = self._rows[turn, : len(rows)].copy_(row_ids, non_blocking=True)
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        apply_bitmask(logits, bits, on_device)

    def _make_buffers(self) -> None:
        is_cuda = self._device.type == "cuda"
        turns, max_rows, _ = self._shape
        self._host = torch.zeros(self._shape, dtype=torch.int32, pin_memory=is_cuda)
        self._host_rows = torch.zeros(turns, max_rows, dtype=torch.int64, pin_memory=is_cuda)
        if is_cuda:
            make_stream: Any = torch.cuda.Stream
            self._stream = make_stream(self._device)
            self._bits = torch.empty(self._shape, dtype=torch.int32, device=self._device)
            self._rows = torch.empty(turns, max_rows, dtype=torch.int64, device=self._device)
            # Their memory may have been another's, whom the main stream has yet to serve.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
