"""Decides whether a sequence ends: by its tokens, limits or grammar. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.model.config import ModelConfig
from engine.request import FinishReason
from engine.sampling.grammar import Matcher
from engine.sequence import Sequence
from engine.text.tokenizer_files import read_end_id


def end_ids_of(model: ModelConfig, tokenizer: Any, folder: Path | None) -> frozenset[int]:
    """Return the tokens that end a text: the model's own, and that of the tokenizer.

    Published folders disagree: where only the tokenizer names the end of a turn, answers
    would continue with the user's next turn.
    """
    end_id: int | None = None
    if tokenizer is not None:
        end_id = tokenizer.eos_token_id
    elif folder is not None:
        end_id = read_end_id(folder)
    if end_id is None or end_id >= model.vocab_size:
        return frozenset(model.eos_token_ids)
    return frozenset((*model.eos_token_ids, end_id))


def is_full(sequence: Sequence, context_limit: int) -> bool:
    """Return whether the newest token is the last one by the limits, whatever token it is."""
    most, count = sequence.request.sampling.max_tokens, len(sequence.token_ids)
    return count >= context_limit or (most is not None and count - sequence.num_prompt >= most)


def check_stop(
    sequence: Sequence, matcher: Matcher | None, context_limit: int
) -> tuple[FinishReason | None, bool]:
    """Return why the newest token ends its request, or None, and whether it is part of the text.

    Advances the request's grammar by the token; raises GrammarFailed if that cannot be followed any
    further.
    """
    if sequence.pooled is not None:
        return FinishReason.STOP, False
    if sequence.request.sampling.max_tokens == 0:
        return FinishReason.LENGTH, False  # the token was not asked for
    token_id = sequence.token_ids[-1]
    is_end = token_id in sequence.stop_ids
    if matcher is not None and matcher.accept(token_id):
        return FinishReason.STOP, not (is_end or token_id == matcher.eos_token_id)
    if is_end:
        return FinishReason.STOP, False
    return (FinishReason.LENGTH if is_full(sequence, context_limit) else None), True
