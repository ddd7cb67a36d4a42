"""Continuous batching of requests that each have their own adapters, from token ids to token ids.

The engine knows nothing of tenants' names, text protocols or queues; only `engine.dash.hub` uses
the network. Start reading at `engine.engine.Engine.step`; docs/memory.md has the memory layout.

Importing this package does not import torch until `Engine` is used: the worker's I/O process uses
only the request types.
"""

import importlib
from typing import TYPE_CHECKING, Any

from engine.errors import (
    AdapterDamaged,
    AdapterMismatch,
    AdapterOverflow,
    AdapterUnavailable,
    BadGrammar,
    ContextTooLong,
    DeadlineExceeded,
    DeadlineUnreachable,
    EngineError,
    GrammarFailed,
    InvalidPrompt,
    OutOfMemory,
    OutOfPages,
    PinLimitExceeded,
    RequestError,
    UnknownAdapter,
    UnsupportedModel,
)
from engine.request import (
    AdapterPart,
    FinishReason,
    KeptPrefix,
    Priority,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.dash.config import DashConfig
    from engine.dash.engine import DashEngine
    from engine.engine import Engine
    from engine.stats import EngineStats

_LAZY = {
    "DashConfig": "engine.dash.config",
    "DashEngine": "engine.dash.engine",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "EngineStats": "engine.stats",
}

__all__ = [
    "AdapterDamaged",
    "AdapterMismatch",
    "AdapterOverflow",
    "AdapterPart",
    "AdapterUnavailable",
    "BadGrammar",
    "ContextTooLong",
    "DashConfig",
    "DashEngine",
    "DeadlineExceeded",
    "DeadlineUnreachable",
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineStats",
    "FinishReason",
    "GrammarFailed",
    "InvalidPrompt",
    "KeptPrefix",
    "OutOfMemory",
    "OutOfPages",
    "PinLimitExceeded",
    "Priority",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "UnknownAdapter",
    "UnsupportedModel",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
