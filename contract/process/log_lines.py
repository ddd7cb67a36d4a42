"""The fields that every log line begins with. Standard library only, for both sides."""

from __future__ import annotations

import datetime as dt
import logging
import sys
import threading
from collections.abc import MutableMapping
from types import FunctionType
from typing import Any

#: The packages whose loggers LORIKEET_LOG_LEVEL sets. At DEBUG, libraries write headers, signed
#: addresses and the values of SQL, so theirs never go below INFO.
OWN_LOGGERS = ("controlplane", "contract", "worker", "engine", "kernels")
FORMATS = ("json", "console")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

_logger = logging.getLogger(__name__)


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


def log_uncaught() -> None:
    """Send to loggers what Python would write to standard error in several lines.

    These are exceptions that end a thread, and those that nobody can catch, of destructors.
    Hooks that somebody else has set stay.
    """
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _log_thread
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _log_unraisable


def _log_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    name = None if args.thread is None else args.thread.name
    _logger.error("thread ended", exc_info=args.exc_value, extra={"thread_name": name})


def _log_unraisable(args: sys.UnraisableHookArgs) -> None:
    event = args.err_msg or "exception ignored"
    # No `repr` of the object: it may be half destroyed, or contain secrets.
    named = args.object if isinstance(args.object, FunctionType) else type(args.object)
    _logger.error(event, exc_info=args.exc_value, extra={"where": named.__qualname__})
