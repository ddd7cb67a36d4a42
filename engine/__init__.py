"""Token ids in, token ids out: continuous batching of requests that each have their own adapters.

Knows nothing of tenants' names, text protocols, networks or queues. Start reading at
`engine.engine.Engine.step`; the memory layout that docstrings refer to is docs/memory.md.
"""

from engine.errors import (
    AdapterMismatch,
    AdapterUnavailable,
    BadGrammar,
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    InvalidPrompt,
    OutOfPages,
    RequestError,
    UnknownAdapter,
    UnsupportedModel,
)
from engine.request import (
    AdapterPart,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

__all__ = [
    "AdapterMismatch",
    "AdapterPart",
    "AdapterUnavailable",
    "BadGrammar",
    "ContextTooLong",
    "DeadlineExceeded",
    "EngineError",
    "FinishReason",
    "InvalidPrompt",
    "OutOfPages",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "UnknownAdapter",
    "UnsupportedModel",
]
