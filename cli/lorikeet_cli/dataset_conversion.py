"""Convert a file of rows in another format into JSONL that Lorikeet trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lorikeet_cli.errors import CliError
from lorikeet_cli.row_formats.conversion import Conversion


def convert_file(source: Path, target: Path) -> dict[str, Any]:
    """Write the converted rows, whole or not at all. -> how many, and what they were.

    Raises CliError, also for rows that do not convert without loss.
    """
    conversion = Conversion()
    try:
        with source.open("rb") as rows, target.open("xb") as file:
            try:
                file.writelines(conversion.lines(rows))
                if conversion.problems:
                    raise CliError(f"{source}: {conversion.complaint} Nothing was written.")
                if not conversion.num_rows:
                    raise CliError(f"{source} has no rows.")
            except BaseException:
                target.unlink()
                raise
    except FileExistsError as error:
        raise CliError(f"{target} already exists. Name a new file.") from error
    except OSError as error:
        raise CliError(f"Cannot convert {source} to {target}: {error.strerror}.") from error
    return {
        "file": str(target),
        "num_rows": conversion.num_rows,
        "converted": dict(sorted(conversion.formats.items())),
    }
