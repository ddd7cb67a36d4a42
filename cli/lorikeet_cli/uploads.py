"""Files on their way out: read in pieces, never whole, and checked against what arrived."""

from __future__ import annotations

import dataclasses
import hashlib
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from lorikeet_cli.errors import CliError

PIECE_BYTES = 1 << 18


@dataclasses.dataclass(slots=True)
class Source:
    """A file to upload. After each whole reading it knows the digest of what was read."""

    path: Path
    num_bytes: int
    sha256: str = ""

    @classmethod
    def of(cls, path: Path) -> Source:
        """Look at the file. Raises CliError when it is none, or cannot be read."""
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise CliError(f"{path} is not a file.")
            with path.open("rb") as file:
                file.read(1)
        except OSError as error:
            raise CliError(f"Cannot read {path}: {error.strerror}.") from error
        return cls(path, found.st_size)

    def pieces(self, seen: Callable[[int], None]) -> Iterator[bytes]:
        """Yield the file's bytes, telling `seen` how many there were. Raises CliError."""
        sha256, read = hashlib.sha256(), 0
        try:
            with self.path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    read += len(piece)
                    if read > self.num_bytes:
                        break
                    sha256.update(piece)
                    yield piece
                    seen(read)
        except OSError as error:
            raise CliError(f"Cannot read {self.path}: {error.strerror}.") from error
        if read != self.num_bytes:
            raise CliError(f"{self.path} changed while it was uploaded. Run the command again.")
        self.sha256 = sha256.hexdigest()
