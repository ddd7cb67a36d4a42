"""Convert a file of rows in a sealed process.

Imports no Django and no settings. The work: {"max_bytes": of the converted file}; the one file is a
pipe that carries the rows. The answer: {"rows": base64, "formats": their names, "complaint"}.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, BinaryIO

from contract.process.sealed_process import serve
from contract.row_formats.conversion import Conversion


def convert_rows(work: dict[str, Any], files: Sequence[BinaryIO]) -> dict[str, Any]:
    """Return the answer for a file of rows."""
    return convert(files[0].read(), **work)


def convert(content: bytes, *, max_bytes: int) -> dict[str, Any]:
    """Convert rows; a result of more than `max_bytes` bytes is a problem."""
    conversion, rows = Conversion(), bytearray()
    for line in conversion.lines(content.split(b"\n")):
        rows += line
        if len(rows) > max_bytes:
            rows.clear()
            conversion.problems.append(f"the converted file has more than {max_bytes} bytes")
            break
    return {
        "rows": base64.b64encode(rows).decode(),
        "formats": ", ".join(sorted(conversion.formats)),
        "complaint": conversion.complaint if conversion.problems else "",
    }


if __name__ == "__main__":
    serve(convert_rows)
