"""Reads a dataset as training examples: token ids, and marks on the tokens that are learned.

`contract.training.row_messages` defines a row, `worker.training.row_tokens` which of its tokens are
learned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from contract.grading.graders import paths_of
from contract.grading.templates import Missing, value_at
from contract.training.chat_rows import MAX_LINE_BYTES, Problem, numbered_rows
from contract.training.data_split import first_prompt_digest, is_validation
from contract.training.job import RANGES, Hyperparameters, JobError, TrainJob
from contract.training.row_messages import Row, method_fault
from engine.text.chat_template import PromptError
from engine.text.codec import TextCodec
from worker.training.row_files import RowFiles
from worker.training.row_tokens import RowTokens, cut, encode_row, row_length

#: How many rows that are too long an error names.
_SHOWN = 10
#: Rows that a training needs.
MIN_ROWS = 2


class DatasetError(ValueError):
    """Raised when a dataset cannot be trained on; the message names the line."""

    field = "dataset"


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
    """Let errors of the block name another field."""
    try:
        yield
    except DatasetError as error:
        error.field = field
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """A dataset as examples.

    num_rows    that are trained on
    num_examples  of them, some rows in parts; a pair is one
    num_cut     rows that were cut
    num_dropped rows that had nothing left to learn after the cut
    validation  examples of the rows to validate with, and `num_validation`, those rows
    num_leaked  rows to validate with whose prompt is trained on, too
    lines, validation_lines  of prompts: the line of each example
    """

    examples: RowFiles
    num_rows: int
    num_examples: int
    num_cut: int = 0
    num_dropped: int = 0
    validation: RowFiles = field(default_factory=RowFiles)
    num_validation: int = 0
    num_leaked: int = 0
    lines: list[int] = field(default_factory=list)
    validation_lines: list[int] = field(default_factory=list)


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield every row with its line's number; raise DatasetError for one that is none."""
    with path.open("rb") as file:
        for number, row in numbered_rows(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")):
            if isinstance(row, Problem):
                raise DatasetError(str(row))
            yield number, row


def encode(codec: TextCodec, number: int, row: Row, hyper: Hyperparameters) -> list[RowTokens]:
    """Return a row's tokens. Raises DatasetError, which names its line."""
    try:
        return encode_row(codec, row, skip_thoughts=hyper.skip_thoughts)
    except (PromptError, ValueError) as error:
        raise DatasetError(f"line {number}: {error}") from error
    except RecursionError as error:
        raise DatasetError(f"line {number}: it is nested too deeply") from error


def load_data(codec: TextCodec, job: TrainJob) -> Examples:
    """Return a job's examples, with those to validate with.

    Raises DatasetError for rows that are wrong, or too few of either kind.
    """
    hyper = job.hyperparameters
    for name in ("eval_steps", "patience"):
        if getattr(hyper, name) is not None and not job.has_validation:
            raise JobError(
                f"hyperparameters.{name}",
                "needs rows to validate with: a validation_share or a validation dataset",
            )
    folder = job.output_dir.parent if job.output_dir.parent.is_dir() else None
    train = _Reader(codec, hyper, folder=folder)
    validation = _Reader(codec, hyper, "of the validation dataset, ", folder=folder)
    prompts: set[bytes] = set()
    for number, row in read_rows(job.dataset):
        is_kept_back = job.validation_dataset is None and is_validation(
            row, hyper.validation_share, job.salt
        )
        (validation if is_kept_back else train).add(number, row)
        if job.validation_dataset is not None:
            prompts.add(first_prompt_digest(row))
    num_leaked = 0
    if job.validation_dataset is not None:
        with _naming("validation_dataset"):
            for number, row in read_rows(job.validation_dataset):
                validation.add(number, row)
                num_leaked += first_prompt_digest(row) in prompts
            validation.check()
    train.check()
    if train.num_rows < MIN_ROWS:
        raise DatasetError(f"rows to train on: {train.num_rows}; {MIN_ROWS} are needed")
    if job.has_validation:
        validation.check()
        if not validation.num_rows:
            most = RANGES["validation_share"].most
            larger = "raise it, " if hyper.validation_share < most else ""
            raise DatasetError(
                f"no row is in the validation share of {hyper.validation_share:g}: {larger}add "
                "rows, or give a validation dataset"
            )
    return Examples(
        examples=train.examples,
        num_rows=train.num_rows,
        num_examples=len(train.examples) // hyper.rows_per_example,
        num_cut=train.num_cut,
        num_dropped=train.num_dropped,
        validation=validation.examples,
        num_validation=validation.num_rows,
        num_leaked=num_leaked,
        lines=train.lines,
        validation_lines=validation.lines,
    )


def load_examples(codec: TextCodec, path: Path, hyper: Hyperparameters) -> Examples:
    """Return a file's examples, none of them to validate with, be they ever so few."""
    reader = _Reader(codec, hyper)
    for number, row in read_rows(path):
        reader.add(number, row)
    reader.check()
    return Examples(
        examples=reader.examples,
        num_rows=reader.num_rows,
        num_examples=len(reader.examples) // hyper.rows_per_example,
        num_cut=reader.num_cut,
        num_dropped=reader.num_dropped,
    )


class _Reader:
    """Makes examples of rows, and counts the rows that are too long."""

    def __init__(
        self,
        codec: TextCodec,
        hyper: Hyperparameters,
        where: str = "",
        *,
        folder: Path | None = None,
    ) -> None:
        self.examples = RowFiles(folder)
        self.num_rows = self.num_cut = self.num_dropped = 0
        self._codec, self._hyper, self._where = codec, hyper, where
        self._max_length = min(hyper.max_length, codec.context_length)
        if hyper.max_tokens is not None:  # a worker needs room for one token more
            room = codec.context_length - hyper.max_tokens - 1
            self._max_length = max(1, min(self._max_length, room))
        self._paths = [] if hyper.grader is None else paths_of(hyper.grader)
        self.lines: list[int] = []
        self._too_long: list[str] = []

    def add(self, number: int, row: Row) -> None:
        """Encode a row. Raises DatasetError, also once enough rows are too long."""
        self.num_rows += 1
        if fault := method_fault(row.kind, self._hyper.method):
            raise DatasetError(f"line {number} {fault}")
        self._check_item(number, row)
        sides = [row] if row.rejected is None else [row, row.rejected]
        tokens = [each for side in sides for each in encode(self._codec, number, side, self._hyper)]
        num_tokens = row_length(tokens)
        if num_tokens > self._max_length:
            self.num_cut += 1
            if not self._hyper.truncate:
                self._too_long.append(f"{self._where}line {number} has {num_tokens}")
                if len(self._too_long) > _SHOWN:
                    self.check()
        if row.item is None:
            kept = list(cut(tokens, self._max_length))
        else:
            kept = tokens if num_tokens <= self._max_length else []
            self.lines += [number] * len(kept)
        if row.rejected is not None and len(kept) < len(sides):
            kept = []
        self.num_dropped += not kept
        for part in kept:
            self.examples.add(part)

    def _check_item(self, number: int, row: Row) -> None:
        """Raise DatasetError if a prompt lacks what the grader takes of it."""
        for path in self._paths:
            try:
                value_at(path, {"item": row.item})
            except Missing:
                raise DatasetError(
                    f"{self._where}line {number} has no {path.removeprefix('item.')}, which the "
                    "grader takes"
                ) from None

    def check(self) -> None:
        """Raise DatasetError if rows are too long, or nothing is left to learn of any."""
        if self._too_long:
            context = self._codec.context_length
            raise DatasetError(_too_long(self._too_long, self._max_length, context))
        if self.num_rows and not self.examples:
            raise DatasetError(
                f"no row has an answer within max_length={self._max_length} tokens: raise it"
            )


def _too_long(rows: list[str], max_length: int, context_length: int) -> str:
    more = ", and more" if len(rows) > _SHOWN else ""
    return (
        f"rows are longer than max_length={max_length} tokens: {', '.join(rows[:_SHOWN])}{more}. "
        f"Raise max_length, up to the model's context of {context_length}, shorten the rows, or "
        "have them cut with truncate"
    )
