"""The job of `python -m worker.dataset_report`: rows, and the base models to count tokens for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

#: Largest number of places that a report names for one kind of finding.
MAX_PLACES = 20
MAX_ANSWER_BYTES = 256 << 10
MAX_BASES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReportJob:
    """Rows, and the bases whose tokens are counted: their names and folders.

    memory_bytes      the most memory for data; None: no limit
    num_earlier_rows  the rows before those that were added
    counted_every     1: the tokens of all rows are counted; 2: of every second row, …
    """

    rows: Path
    bases: dict[str, Path]
    memory_bytes: int | None = None
    num_earlier_rows: int = 0
    counted_every: int = 1

    def write(self, path: Path) -> None:
        """Write the job where `read` finds it."""
        path.write_text(json.dumps(dataclasses.asdict(self), default=str))

    @classmethod
    def read(cls, path: Path) -> ReportJob:
        """Return the job in a file. Raises ValueError, OSError."""
        fields: dict[str, Any] = json.loads(path.read_text())
        return cls(
            rows=Path(fields["rows"]),
            bases={name: Path(folder) for name, folder in fields["bases"].items()},
            memory_bytes=fields.get("memory_bytes"),
            num_earlier_rows=fields.get("num_earlier_rows", 0),
            counted_every=fields.get("counted_every", 1),
        )
