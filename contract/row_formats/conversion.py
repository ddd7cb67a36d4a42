"""Convert a file of rows in another format, line by line, into JSONL of rows of ours."""

from __future__ import annotations

import codecs
import collections
from collections.abc import Iterable, Iterator
from typing import Any

from ..strict_json import read_array, read_value
from .formats import converted, is_turn
from .keys import NotConverted, json_text

#: Number of problems after which a conversion ends.
MAX_PROBLEMS = 20
_SHOWN_PROBLEMS = 5


class Conversion:
    """Converts one file; afterwards it knows the formats of its rows and its problems.

    num_rows  that were written
    formats   by their names, how many lines were in each; rows of ours are not counted
    problems  each a sentence that names the line
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.formats: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    @property
    def complaint(self) -> str:
        """Write the first few problems in one sentence."""
        more = "; and more" if len(self.problems) > _SHOWN_PROBLEMS else ""
        return f"{'; '.join(self.problems[:_SHOWN_PROBLEMS])}{more}."

    def lines(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the lines of the converted file; rows of ours as they are."""
        for where, row, line in _rows(lines):
            if isinstance(row, ValueError):
                self.problems.append(f"{where} {row}")
            else:
                yield from self._made(where, row, line)
            if len(self.problems) == MAX_PROBLEMS:
                return

    def _made(self, where: str, row: Any, line: bytes | None) -> list[bytes]:
        """Return the lines of a row: its own, unless that is None or of another format."""
        try:
            name, rows = converted(row)
            if name is None and line is None:
                name = "a JSON array"
            made = [_written(each) for each in rows] if name or line is None else [line]
        except NotConverted as error:
            field, problem = error.args
            self.problems.append(f"{where}: {field} {problem}" if field else f"{where} {problem}")
            return []
        except RecursionError:
            self.problems.append(f"{where} is nested too deeply")
            return []
        if name:
            self.formats[name] += 1
        self.num_rows += len(made)
        return [each + b"\n" for each in made]


def _rows(lines: Iterable[bytes]) -> Iterator[tuple[str, Any, bytes | None]]:
    """Yield each row or its fault, after its place, with the line if the row is all of it."""
    rest, is_first = iter(lines), True
    for number, line in enumerate(rest, start=1):
        if not line.strip():
            continue
        where, begins = f"line {number}", line.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        try:
            if begins != b"[":
                yield where, read_value(_text(line)), line.rstrip(b"\r\n")
            # the array continues to the end of the file
            elif is_first and not line.rstrip().endswith(b"]"):
                yield from _of_array(where, _text(b"\n".join([line, *rest])))
            else:
                yield from _of_array(where, _text(line))
        except ValueError as error:
            yield where, error, None
        is_first = False


def _of_array(where: str, text: str) -> Iterator[tuple[str, Any, None]]:
    """Yield an array's rows; the array itself if it is a list of messages."""
    items = read_array(text)
    for number, item in enumerate(items, start=1):
        if number == 1 and is_turn(item):
            yield where, [item, *items], None
        else:
            yield f"{where}, row {number}", item, None


def _text(line: bytes) -> str:
    try:
        return line.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        raise ValueError("is not JSON: it is not text in UTF-8") from None


def _written(row: Any) -> bytes:
    try:
        return json_text(row).encode()
    except UnicodeEncodeError:
        raise NotConverted("", "has half of a surrogate pair, which is not a character") from None
