"""Convert a file of rows in another format, line by line, into JSONL of rows of ours."""

from __future__ import annotations

import codecs
import collections
from collections.abc import Iterable, Iterator
from typing import Any

from ..strict_json import read_value
from .formats import converted
from .keys import NotConverted, json_text

#: How many problems a conversion finds before it ends.
MAX_PROBLEMS = 20
_SHOWN_PROBLEMS = 5


class Conversion:
    """Converts one file. Afterwards: what its rows were, and the problems that it has.

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
        rest = iter(lines)
        is_first = True
        for number, line in enumerate(rest, start=1):
            if not line.strip():
                continue
            if is_first and _begins_array(line):
                line = b"\n".join([line, *rest])  # an array may be written over many lines
            is_first = False
            try:
                yield from self._converted(line)
            except (ValueError, RecursionError) as error:
                told = "is nested too deeply" if isinstance(error, RecursionError) else error
                self.problems.append(f"line {number} {told}")
            except NotConverted as error:
                field, problem = error.args
                place = f"line {number}: {field} " if field else f"line {number} "
                self.problems.append(place + problem)
            if len(self.problems) == MAX_PROBLEMS:
                return

    def _converted(self, line: bytes) -> Iterator[bytes]:
        name, rows = converted(_read(line))
        if name is None:
            made = [line.rstrip(b"\r\n")]
        else:
            made = [_written(row) for row in rows]
            self.formats[name] += 1
        self.num_rows += len(made)
        for row in made:
            yield row + b"\n"


def _begins_array(line: bytes) -> bool:
    """Whether a line begins an array that it does not end."""
    text = line.removeprefix(codecs.BOM_UTF8).strip()
    return text.startswith(b"[") and not text.endswith(b"]")


def _read(line: bytes) -> Any:
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        raise ValueError("is not JSON, which is text in UTF-8") from None
    return read_value(text)


def _written(row: Any) -> bytes:
    try:
        return json_text(row).encode()
    except UnicodeEncodeError:
        raise ValueError("has half of a surrogate pair, which is no character") from None
