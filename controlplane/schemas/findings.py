"""The linter's findings about a schema's keywords."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    """The treatment of one keyword."""

    ENFORCED = "enforced"  # tokens that would violate it are never chosen
    CHECKED = "checked"  # the finished answer is checked against it, and may fail
    UNSUPPORTED = "unsupported"  # it is ignored
    ANNOTATION = "annotation"  # it requires nothing


@dataclass(frozen=True, slots=True)
class Finding:
    """One keyword. `path` is its JSON pointer in the schema."""

    path: str
    status: Status
    reason: str = ""

    @property
    def keyword(self) -> str:
        return self.path.rsplit("/", 1)[-1].replace("~1", "/").replace("~0", "~")

    def to_dict(self) -> dict[str, str]:
        return {
            "path": self.path,
            "keyword": self.keyword,
            "status": self.status.value,
            "reason": self.reason,
        }


class BadSchema(Exception):
    """Raised for a schema that cannot be used; `path` is the JSON pointer of the problem."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def __str__(self) -> str:
        where = f" (at {self.path[:200]})" if self.path else ""
        return f"{self.problem}{where}"
