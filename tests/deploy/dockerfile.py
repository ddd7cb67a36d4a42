"""The stages of our Dockerfile, as far as the tests need them."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@dataclasses.dataclass(slots=True)
class Stage:
    """One image: its pins, and what of the repository is in it."""

    name: str
    requirements: str | None = None
    copies: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def copy_into(self, folder: Path) -> None:
        """Copy the same files that the image gets, to the same places, as far as compiled."""
        for source, target in self.copies:
            path = folder / target
            path.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, path)
            else:
                shutil.copy(ROOT / source, path)


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    stage = Stage("")
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if match := re.match(r"FROM \S+ AS (\S+)", line):
            stage = found[match[1]] = Stage(match[1])
        elif match := re.match(r"COPY (\S+) (\S+)$", line):
            stage.copies.append((match[1], match[2]))
        elif match := re.match(r"RUN pip install (?:\$PIP_OPTIONS )?-r (\S+)$", line):
            stage.requirements = match[1]
    return found
