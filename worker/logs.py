"""The logging of the worker's processes: one line per record, as JSON or for people.

As in the control plane: the standard library's loggers, `extra` as fields, and what
`structlog.contextvars` has bound. docs/logs.md lists the fields.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog
from structlog.typing import Processor

from contract.process.log_lines import OWN_LOGGERS, add_origin, levels, log_uncaught
from contract.process.log_secrets import mask_secrets

_MAX_FRAMES = 30
#: Libraries that give their loggers handlers of their own.
_HANDLERS_OF_THEIR_OWN = ("transformers", "huggingface_hub")


def configure_logs(log_format: str = "console", level: str = "INFO") -> None:
    """Have all loggers of this process write to standard error in the format."""
    handler = logging.StreamHandler()
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(processors=_processors(log_format)))
    own, others = levels(level)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(others)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(own)
    logging.captureWarnings(True)
    log_uncaught()


def adopt_libraries() -> None:
    """Make libraries imported after `configure_logs` write through the root logger, too."""
    for name in _HANDLERS_OF_THEIR_OWN:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True


def _processors(log_format: str) -> list[Processor]:
    fields: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.ExtraAdder(),
        _split_engine_id,
        add_origin,
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
    ]
    if log_format == "json":
        frames = structlog.tracebacks.ExceptionDictTransformer(
            show_locals=False, max_frames=_MAX_FRAMES
        )
        written: Processor = structlog.processors.ExceptionRenderer(frames)
        return [
            *fields,
            written,
            mask_secrets,
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ]
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    return [*fields, structlog.processors.format_exc_info, mask_secrets, console]


def _split_engine_id(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Replace the engine's id in a line by the request's own id, the lease and the prompt."""
    request_id = event.get("request_id")
    if isinstance(request_id, str) and "#" in request_id:
        event["request_id"], _, event["engine_part"] = request_id.partition("#")
    return event
