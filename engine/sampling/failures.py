"""The errors of sequences whose token could not be chosen."""

from __future__ import annotations

import logging

from engine.errors import EngineError, GrammarFailed
from engine.sampling.sampler import Sampled
from engine.sequence import Sequence

log = logging.getLogger(__name__)


def failed_token(sequence: Sequence, error: BaseException) -> Sampled:
    """Return the error of a sequence for which something was raised."""
    return Sampled(0, None, error=as_engine_error(sequence.request.request_id, error))


def as_engine_error(request_id: str, error: BaseException) -> EngineError:
    """Return the error for the client; log one that was not foreseen, or that is a defect."""
    if isinstance(error, GrammarFailed):
        reason, seen = error.reason, {"request_id": request_id}
        log.error("the grammar of an answer could not be followed: %s", reason, extra=seen)
    if isinstance(error, EngineError):
        return error
    log.error("request failed", exc_info=error, extra={"request_id": request_id})
    return EngineError(f"internal error: {type(error).__name__}")
