"""Read a dataset's JSONL, and say what is wrong with it, line by line.

`contract.training.row_messages` defines a row, a chat, a completion or a prompt, and
`preference_rows` a pair of answers. The rules are the same at upload and in training.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from contract.row_formats.formats import converted, format_of
from contract.row_formats.keys import NotConverted, is_pair
from contract.strict_json import read_value
from contract.training.preference_rows import read_pair
from contract.training.row_messages import (
    KINDS,
    Row,
    WrongRow,
    is_prompt,
    read_prompt,
    read_row,
)

MAX_ROWS = 1_000_000
MAX_LINE_BYTES = 1 << 20
#: Number of problems after which the lint stops.
MAX_PROBLEMS = 20
#: Number of problems that a refusal names.
_SHOWN_PROBLEMS = 5
_NO_JSON = "is not JSON"
_FORM = (
    ' The file must be JSONL, with one chat in each line: {"messages": [{"role": "user", '
    '"content": "…"}, …]}. '
    "`lorikeet datasets convert FILE NEW_FILE` converts a JSON array and other formats."
)
_OTHER_FORMAT = "is a row of another format"
_CONVERT = (
    " `lorikeet datasets convert FILE NEW_FILE` converts the file, as the console's upload does."
)
#: The fault of a row of another kind than the rows before.
_MIXED = "has {}, but the rows before have {}: keep them in separate files"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A fault, and its place. `line` counts from 1; 0 is the file as a whole."""

    line: int
    field: str
    message: str

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line else "the file"
        return f"{where}: {self.field} {self.message}" if self.field else f"{where} {self.message}"


@dataclasses.dataclass(frozen=True, slots=True)
class Lint:
    """The outcome of the lint; a dataset without problems is valid."""

    num_rows: int
    problems: list[Problem]

    @property
    def complaint(self) -> str:
        """Write the first few problems in one sentence."""
        shown = "; ".join(str(problem) for problem in self.problems[:_SHOWN_PROBLEMS])
        more = "; and more" if len(self.problems) > _SHOWN_PROBLEMS else ""
        # A file of another kind, such as CSV, has the same fault in each line; explain the format
        # once.
        found = {each.message.partition(":")[0] for each in self.problems}
        advice = _CONVERT if _OTHER_FORMAT in found else _FORM if _NO_JSON in found else ""
        return f"{shown}{more}.{advice}"


def lint(content: bytes) -> Lint:
    """Check every row, up to MAX_PROBLEMS problems. Blank lines are not rows."""
    return lint_lines(content.split(b"\n"))


def lint_lines(lines: Iterable[bytes]) -> Lint:
    """Do what `lint` does, with lines that need not all be in memory."""
    problems: list[Problem] = []
    num_rows = 0
    for row in read_rows(lines):
        num_rows += 1
        if isinstance(row, Problem):
            problems.append(row)
            if not row.line:
                num_rows = 0
        if len(problems) == MAX_PROBLEMS:
            break
    return Lint(num_rows, problems)


def read_rows(lines: Iterable[bytes]) -> Iterator[Row | Problem]:
    """Yield each row, or what is wrong with it; see `numbered_rows`."""
    return (row for _, row in numbered_rows(lines))


def numbered_rows(lines: Iterable[bytes]) -> Iterator[tuple[int, Row | Problem]]:
    """Yield each row, or what is wrong with it, after its line's number.

    Blank lines are left out; all rows are of one kind. Ends with a Problem after MAX_ROWS
    rows, and when there is no row.
    """
    num_rows = 0
    kind = ""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        num_rows += 1
        if num_rows > MAX_ROWS:
            yield number, Problem(number, "", f"is past the limit of {MAX_ROWS} rows")
            return
        try:
            row = _row(line)
        except WrongRow as wrong:
            yield number, Problem(number, *wrong.args)
            continue
        kind = kind or row.kind
        if row.kind == kind:
            yield number, row
        else:
            yield number, Problem(number, "", _MIXED.format(KINDS[row.kind][0], KINDS[kind][0]))
    if not num_rows:
        yield 0, Problem(0, "", "has no rows")


def _row(line: bytes) -> Row:
    line = line.removeprefix(codecs.BOM_UTF8)
    if len(line) > MAX_LINE_BYTES:
        if line.lstrip().startswith(b"["):
            raise _of_another_format("a JSON array")
        raise WrongRow("", f"is longer than {MAX_LINE_BYTES} bytes")
    try:
        # Decode the text here: `json` guesses the encoding, and a sealed process cannot load
        # codecs.
        row = read_value(line.decode())
    except UnicodeDecodeError:
        raise WrongRow("", f"{_NO_JSON}: it is not text in UTF-8") from None
    except ValueError as error:
        # A parser's position helps in a config, but not in a file that is not JSONL at all.
        told = str(error)
        raise WrongRow("", _NO_JSON if told.startswith(_NO_JSON) else told) from None
    try:
        read = read_pair(row) if is_pair(row) else read_row(row)
    except WrongRow as wrong:
        if not is_prompt(row) or is_pair(row):
            raise _explained(row, wrong) from None
        read = read_prompt(row)
    if _SURROGATE.search(line):
        _check_text(row)
    return read


def _explained(row: Any, wrong: WrongRow) -> WrongRow:
    """Return what is wrong with a row, which may be one of another format."""
    try:
        name, rows = converted(row)
        if name is None:
            return wrong
        for each in rows:
            read_row(each)
    except (NotConverted, WrongRow) as error:
        field, message = error.args
        found = format_of(row)
        return WrongRow(field, f"{message} (the format is {found.name})" if found else message)
    except RecursionError:
        return WrongRow("", "is nested too deeply")
    return _of_another_format(name)


def _of_another_format(name: str) -> WrongRow:
    return WrongRow("", f"{_OTHER_FORMAT}: {name}")


def _check_text(row: Any) -> None:
    """Refuse half of a surrogate pair: it is not a character, and tokenizers refuse it."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise WrongRow("", "has half of a surrogate pair, which is not a character") from None
