"""Print results: tables and fields for people, or one JSON document for scripts.

Answers go to standard output, and everything else to standard error. Nothing has colours, so that
both read the same in a terminal, a pipe and a log.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

Row = Mapping[str, Any]
#: A column's title, and the field that it shows or a function of the row.
Column = tuple[str, str | Callable[[Row], Any]]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Form(StrEnum):
    TABLE = "table"
    JSON = "json"
    ID = "id"


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False))


def print_json_line(document: Any) -> None:
    print(json.dumps(document, ensure_ascii=False), flush=True)


def print_table(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Print one line for each row under the columns' titles."""
    print_lines([[title for title, _ in columns], *(cells(row, columns) for row in rows)])


def print_fields(row: Row, columns: Sequence[Column]) -> None:
    """Print one thing, a line for each of its fields."""
    titles = [title for title, _ in columns]
    print_lines([list(line) for line in zip(titles, cells(row, columns), strict=True)])


def print_id(row: Row, columns: Sequence[Column]) -> None:
    """Print the row's id: its first column."""
    print(cells(row, columns[:1])[0])


def print_lines(lines: Sequence[Sequence[str]]) -> None:
    """Print lines of cells, each column as wide as its widest cell."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(padded).rstrip())


def say(text: str) -> None:
    """Say something to a person; no script reads it."""
    print(shown(text), file=sys.stderr, flush=True)


def shown(value: Any) -> str:
    """Return a value as one printable line, so that servers cannot control the terminal."""
    if value is None or value == "" or value == []:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ",".join(shown(each) for each in value)
    if isinstance(value, Mapping):
        return " ".join(f"{name}={shown(each)}" for name, each in value.items()) or "-"
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def moment(field: str) -> Callable[[Row], str]:
    """Return a column's function that writes the time in `field` to the second."""
    return lambda row: str(row.get(field) or "-")[:19].replace("T", " ")


def num_bytes(field: str) -> Callable[[Row], str]:
    """Return a column's function that writes the size in `field`."""
    return lambda row: size(row.get(field))


def size(count: int | None) -> str:
    if count is None:
        return "-"
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """Write a row's cell of each column."""
    return [shown(field(row) if callable(field) else row.get(field)) for _, field in columns]
