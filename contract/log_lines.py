"""The fields that every log line begins with. Standard library only, for both sides."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import MutableMapping
from typing import Any

#: Loggers that LORIKEET_LOG_LEVEL is for. At DEBUG libraries write headers and addresses with
#: signatures, and SQL with its values, so theirs never go below INFO.
OWN_LOGGERS = ("controlplane", "contract", "worker", "engine", "kernels")
FORMATS = ("json", "console")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def add_origin(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Begin the line with `timestamp`, `level`, `logger` and `event`. A processor of structlog."""
    record: logging.LogRecord = event["_record"]
    at = dt.datetime.fromtimestamp(record.created, tz=dt.UTC)
    origin: dict[str, Any] = {
        "timestamp": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": event["event"],
    }
    return origin | {name: value for name, value in event.items() if name not in origin}


def levels(level: str) -> tuple[str, str]:
    """Return the level of our own loggers and that of all others."""
    return level, "INFO" if level == "DEBUG" else level
