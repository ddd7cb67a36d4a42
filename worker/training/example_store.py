"""Keeps a training's examples on disk, so that memory does not grow with the dataset's tokens.

Of each example 32 bytes are in memory, and 16 more for each learned span; its tokens are in an
unnamed file, which is gone when the process is.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from worker.training.row_tokens import RowTokens

#: Label of a token without a loss; losses of PyTorch and Hugging Face skip this value.
IGNORED = -100
_TOKEN = "i"
_TOKEN_BYTES = array(_TOKEN).itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row, or a part of it, as tokens."""

    input_ids: list[int]
    labels: list[int]  # the token where it is learned, IGNORED elsewhere

    def as_input(self) -> dict[str, list[int]]:
        """Return what `collate` takes."""
        mask = [1] * len(self.input_ids)
        return {"input_ids": self.input_ids, "labels": self.labels, "attention_mask": mask}


class ExampleStore(Sequence[Example]):
    """Examples in the order in which they were added.

    folder  on the disk that holds their tokens; None: that of temporary files
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # it lives as long as this
        self._starts, self._spans_from = array("Q", [0]), array("Q", [0])
        self._spans = array("Q")

    def add(self, tokens: RowTokens) -> None:
        self._file.write(array(_TOKEN, tokens.token_ids).tobytes())
        self._starts.append(self._starts[-1] + len(tokens.token_ids))
        for span in tokens.learned:
            self._spans.extend((span.start, span.stop))
        self._spans_from.append(len(self._spans))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def num_tokens(self) -> int:
        """The tokens of all examples."""
        return self._starts[-1]

    def length(self, index: int) -> int:
        """Return the tokens of an example, without reading them."""
        return self._starts[index + 1] - self._starts[index]

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        self._file.flush()
        size, offset = self.length(index) * _TOKEN_BYTES, self._starts[index] * _TOKEN_BYTES
        tokens = array(_TOKEN, os.pread(self._file.fileno(), size, offset)).tolist()
        labels = [IGNORED] * len(tokens)
        spans = self._spans[self._spans_from[index] : self._spans_from[index + 1]]
        for start, stop in zip(spans[::2], spans[1::2], strict=True):
            labels[start:stop] = tokens[start:stop]
        return Example(input_ids=tokens, labels=labels)

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))


class TrainingInputs(Sequence[dict[str, list[int]]]):
    """Examples as the Trainer takes them."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # the Trainer's are int
        return self._examples[index].as_input()
