"""The first rows of a dataset, as they were uploaded."""

from __future__ import annotations

import json
import math
from typing import Any

from contract.training.chat_rows import MAX_LINE_BYTES
from controlplane.errors import Conflict
from controlplane.infra import storage
from controlplane.tenants.auth import Permission, Principal, authorize
from controlplane.training.datasets import contents
from controlplane.training.models import Dataset

MAX_PREVIEW = 100


@storage.answering()
def rows_preview(dataset: Dataset, limit: int, *, by: Principal) -> list[dict[str, Any]]:
    """Return up to `limit` rows with their lines' numbers; fewer if they are long.

    Raises PermissionDenied for captured requests that `by` may not read, Conflict when the rows
    were replaced just now, or Unavailable.
    """
    if contents.has_requests(dataset.sha256):
        authorize(by, Permission.REQUESTS_CONTENT)
    most = MAX_LINE_BYTES + 1  # so that at least one line is whole
    content = b""
    try:
        for piece in contents.pieces(dataset.sha256):
            content += piece[: most - len(content)]
            if len(content) == most:
                break
    except storage.ObjectMissing as error:
        raise Conflict("The rows were replaced just now: repeat the request.") from error
    lines = content.split(b"\n")
    if len(content) == most:
        lines.pop()  # the last one is incomplete
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and len(rows) < limit:
            rows.append({"line": number, "row": _row(line)})
    return rows


def _row(line: bytes) -> Any:
    """Return a row; None for an old one that cannot be written as JSON."""
    try:
        row = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
        json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return row


def _finite(text: str) -> float | None:
    """Return a number, or None for one that is too large: JSON has no infinity."""
    number = float(text)
    return number if math.isfinite(number) else None
