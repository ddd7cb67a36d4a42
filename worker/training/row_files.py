"""Keeps a training's rows on disk, so that memory does not grow with the dataset's tokens.

Of each row some bytes are in memory; its tokens and their marks are in unnamed files, which are
gone when the process is.
"""

from __future__ import annotations

import mmap
import tempfile
from array import array
from pathlib import Path
from typing import IO

import torch

from engine.training.run import RunRows
from worker.training.row_tokens import RowTokens

_TOKEN = "i"


class RowFiles:
    """Rows in the order in which they were added.

    folder      on the disk that holds them; None: that of temporary files
    num_tokens  of all rows
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._token_ids = tempfile.TemporaryFile(dir=folder)  # it lives as long as this
        self._is_answer = tempfile.TemporaryFile(dir=folder)
        self._lengths = array("Q")
        self.num_tokens = 0

    def add(self, tokens: RowTokens) -> None:
        marks = bytearray(len(tokens.token_ids))
        for span in tokens.learned:
            marks[span.start : span.stop] = b"\x01" * len(span)
        marks[:1] = b"\x00"  # nothing predicts it
        self._token_ids.write(array(_TOKEN, tokens.token_ids).tobytes())
        self._is_answer.write(marks)
        self._lengths.append(len(marks))
        self.num_tokens += len(marks)

    def __len__(self) -> int:
        return len(self._lengths)

    def rows(self) -> RunRows:
        """Return the added rows (at least one) without reading them into memory."""
        token_ids = torch.frombuffer(_mapped(self._token_ids), dtype=torch.int32)
        is_answer = torch.frombuffer(_mapped(self._is_answer), dtype=torch.bool)
        return RunRows(token_ids, is_answer, self._lengths.tolist())


def _mapped(file: IO[bytes]) -> mmap.mmap:
    file.flush()
    return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
