"""The logging of the control plane's processes: one line per record, as JSON or for people.

All code, ours and libraries', uses the standard library's loggers; `extra` becomes fields of the
line, and so does what `structlog.contextvars` has bound: docs/logs.md lists the fields.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog
from structlog.typing import Processor

from contract.process.log_lines import FORMATS, LEVELS, OWN_LOGGERS, add_origin, levels
from contract.process.log_secrets import mask_secrets

#: Objects that Django and uvicorn add, and a second form of the message.
_NOISE = ("request", "server_time", "color_message")
_MAX_FRAMES = 30


class WrongSetting(Exception):
    """Raised for a format or level that does not exist; the message names the variable."""


def logging_config(log_format: str, level: str, *context: Processor) -> dict[str, Any]:
    """Return Django's LOGGING.

    log_format  "json", or "console": coloured in a terminal
    level       of our own loggers
    context     further processors, which add fields
    Raises WrongSetting.
    """
    log_format, level = log_format.lower(), level.upper()
    if log_format not in FORMATS:
        raise WrongSetting(
            f"LORIKEET_LOG_FORMAT is {log_format!r}: set one of {', '.join(FORMATS)}"
        )
    if level not in LEVELS:
        raise WrongSetting(f"LORIKEET_LOG_LEVEL is {level!r}: set one of {', '.join(LEVELS)}")
    own, others = levels(level)
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {
            "line": {
                "()": structlog.stdlib.ProcessorFormatter,
                "processors": _processors(log_format, context),
            }
        },
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            **{name: {"level": own} for name in OWN_LOGGERS},
            # Without handlers of their own, which uvicorn and Django would add.
            **{name: {"handlers": [], "propagate": True} for name in ("uvicorn", "django")},
            # Its lines have query strings; `request_lines` writes ours. uvicorn makes none without
            # a handler.
            "uvicorn.access": {"handlers": [], "propagate": False},
            "django.server": {"handlers": [], "propagate": True},
            # Its warnings have whole URLs, which may be secrets of a tenant.
            "urllib3.connection": {"level": "ERROR"},
        },
        "root": {"handlers": ["stderr"], "level": others},
    }


def _processors(log_format: str, context: tuple[Processor, ...]) -> list[Processor]:
    fields: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.ExtraAdder(),
        _drop_noise,
        *context,
        add_origin,
    ]
    end: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if log_format == "json":
        frames = structlog.tracebacks.ExceptionDictTransformer(
            show_locals=False, max_frames=_MAX_FRAMES
        )
        end += [structlog.processors.ExceptionRenderer(frames), mask_secrets]
        return [*fields, *end, structlog.processors.JSONRenderer(ensure_ascii=False)]
    end += [structlog.processors.format_exc_info, mask_secrets]
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    return [*fields, *end, console]


def _drop_noise(_: Any, __: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    for name in _NOISE:
        event.pop(name, None)
    if event["_record"].name == "django.security.DisallowedHost":
        event.pop("exc_info", None)  # a traceback of 2.5 KB with the raw header
    return event
