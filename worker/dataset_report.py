"""Report on a dataset's rows: duplicates, and their tokens under each base model.

    python -m worker.dataset_report JOB.json

JOB.json is `contract.training.dataset_report.ReportJob`. Standard output carries one JSON object:

    {"num_rows", "duplicates": {"count", "lines": [[line, first line]]},
     "added": {"num_rows", "duplicates"},    of these: duplicates of earlier rows
     "arguments": {"unwrapped": {"count", "lines": [[line, place]]},   were encoded twice
                   "invalid": {"count", "lines": [[line, place]]},     break the tool's schema
                   "num_unchecked"},         of learned calls
     "counted_every",                        1: all rows are counted in tokens; else estimates
     "bases": {name: {"context_length", "tokens", "learned_tokens", "mean", "median", "p95", "max",
                      "longer_than_context": {"count", "lines": [[line, tokens]]},
                      "refused": {"count", "lines": [[line, why]]}}}}

`worker.one_job` has the exit codes.
"""

from __future__ import annotations

import array
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contract.training.chat_rows import MAX_LINE_BYTES, Problem, numbered_rows
from contract.training.dataset_report import MAX_PLACES, ReportJob
from contract.training.row_messages import Row
from engine.text.chat_template import PromptError
from engine.text.codec import TextCodec
from worker.call_arguments import NOT_CHECKED, SchemaCheck, learned_calls
from worker.one_job import answer_job
from worker.training.row_tokens import encode_row, row_length

_MAX_REASON_CHARS = 200


class _Findings:
    """Counts findings, and keeps the places of the first ones."""

    def __init__(self) -> None:
        self._count = 0
        self._lines: list[list[Any]] = []

    def add(self, line: int, about: Any) -> None:
        self._count += 1
        if len(self._lines) < MAX_PLACES:
            self._lines.append([line, about])

    def told(self) -> dict[str, Any]:
        return {"count": self._count, "lines": self._lines}


class _Counts:
    """The tokens of rows under one base; of `every` rows one was counted."""

    def __init__(self, folder: Path, every: int) -> None:
        self._codec, self._every = TextCodec(folder), every
        self._lengths = array.array("L")
        self._learned = self._others = 0  # tokens of the shorter answers of pairs
        self._too_long, self._refused = _Findings(), _Findings()

    def add(self, line: int, row: Row) -> None:
        try:
            examples = encode_row(self._codec, row)
            if row.rejected is not None:
                examples += encode_row(self._codec, row.rejected)
        except (PromptError, ValueError) as error:
            # The text may quote the row, and the place where it is stored cannot hold every
            # character.
            reason = "".join(c if c.isprintable() else "?" for c in str(error)[:_MAX_REASON_CHARS])
            self._refused.add(line, reason)
            return
        longest = row_length(examples)
        self._lengths.append(longest)
        if row.rejected is not None:
            self._others += len(examples[0].token_ids) + len(examples[1].token_ids) - longest
        self._learned += sum(example.num_learned for example in examples)
        if longest > self._codec.context_length:
            self._too_long.add(line, longest)

    def told(self) -> dict[str, Any]:
        lengths, number = sorted(self._lengths), len(self._lengths)
        total = sum(lengths)
        return {
            "context_length": self._codec.context_length,
            "tokens": (total + self._others) * self._every,
            "learned_tokens": self._learned * self._every,
            "mean": round(total / number, 1) if number else 0,
            "median": lengths[number // 2] if number else 0,
            "p95": lengths[number * 95 // 100] if number else 0,
            "max": lengths[-1] if number else 0,
            "longer_than_context": self._too_long.told(),
            "refused": self._refused.told(),
        }


class _Arguments:
    """The arguments of learned calls that were encoded twice, or that break their schema.

    Of the rows that are counted in tokens, those of all calls are checked, while there is time.
    """

    def __init__(self) -> None:
        self._unwrapped, self._invalid = _Findings(), _Findings()
        self._check = SchemaCheck()
        self._num_unchecked = 0

    def add(self, line: int, row: Row, *, is_checked: bool) -> None:
        for place in row.unwrapped:
            self._unwrapped.add(line, place)
        for place, call in learned_calls(row):
            fault = self._check.fault(row, call) if is_checked else NOT_CHECKED
            if fault == NOT_CHECKED:
                self._num_unchecked += 1
            elif fault is not None:
                self._invalid.add(line, f"{place} {fault}")

    def told(self) -> dict[str, Any]:
        return {
            "unwrapped": self._unwrapped.told(),
            "invalid": self._invalid.told(),
            "num_unchecked": self._num_unchecked,
        }


def report(job: ReportJob) -> dict[str, Any]:
    """Return the report. Raises ValueError for a file with a line that is not a row."""
    arguments = _Arguments()
    bases = {name: _Counts(folder, job.counted_every) for name, folder in job.bases.items()}
    duplicates, known = _Findings(), _Findings()
    first_of: dict[bytes, int] = {}
    num_rows, last_earlier = 0, 0
    for line, row in _rows(job.rows):
        num_rows += 1
        if num_rows <= job.num_earlier_rows:
            last_earlier = line
        first = first_of.setdefault(_digest(row), line)
        if first != line:
            duplicates.add(line, first)
            if first <= last_earlier < line:
                known.add(line, first)
        is_counted = num_rows % job.counted_every == 0
        arguments.add(line, row, is_checked=is_counted)
        if is_counted:
            for counts in bases.values():
                counts.add(line, row)
    return {
        "num_rows": num_rows,
        "duplicates": duplicates.told(),
        "added": {"num_rows": num_rows - job.num_earlier_rows, "duplicates": known.told()},
        "arguments": arguments.told(),
        "counted_every": job.counted_every,
        "bases": {name: counts.told() for name, counts in bases.items()},
    }


def _digest(row: Row) -> bytes:
    sides = [row] if row.rejected is None else [row, row.rejected]
    told = [
        [each.messages, each.learned, each.tools, each.prompt, each.completion] for each in sides
    ]
    return hashlib.sha256(json.dumps(told).encode()).digest()[:16]


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    with path.open("rb") as file:
        for line, row in numbered_rows(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")):
            if isinstance(row, Problem):
                raise ValueError(str(row))
            yield line, row


def main() -> int:
    return answer_job(ReportJob.read, report)


if __name__ == "__main__":
    sys.exit(main())
