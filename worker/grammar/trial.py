"""Tries in a helper process whether a grammar can be compiled and followed at acceptable cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import BadGrammar
from engine.grammar_text import Grammar, GrammarKind, parser_limits

#: Random tokens that a trial generates, to see what following the grammar costs.
TRIAL_TOKENS = 48


def set_up(model_dir: str) -> Callable[[Grammar], str | None]:
    """Make a function grammar -> what is wrong with it, or None.

    It does not import Outlines and transformers, which would triple the memory: in compiling a
    grammar they only call llguidance's `grammar_from`.
    """
    import llguidance

    tokenizer_file = Path(model_dir, "tokenizer.json")
    tokenizer = llguidance.LLTokenizer(tokenizer_file.read_text())
    limits = parser_limits(llguidance)

    def try_grammar(grammar: Grammar) -> str | None:
        return _try(llguidance, tokenizer, limits, grammar)

    return try_grammar


_FORMATS = {
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.LARK: "lark",
}


def _try(llguidance: Any, tokenizer: Any, limits: Any, grammar: Grammar) -> str | None:
    try:
        source = llguidance.grammar_from(_FORMATS[grammar.kind], grammar.source())
    except (BadGrammar, ValueError) as error:
        return f"it is not valid: {error}"
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        return f"it cannot be enforced: {_first_line(matcher.get_error())}"
    rng = random.Random(0)
    for number in range(TRIAL_TOKENS):
        token_id = _any_token(matcher.compute_bitmask(), rng)
        if matcher.is_error():
            return _failure(matcher.get_error())
        if token_id is None:
            return "nothing satisfies it" if number == 0 else None
        matcher.consume_token(token_id)
        if matcher.is_error() or matcher.is_stopped():
            return None
    return None


def _failure(message: str) -> str:
    """Return why a grammar could not be followed, without the decoder's insides."""
    if message.startswith("NoExtension"):
        return "it leads to a place where nothing may follow"
    return "it costs too much to follow"


def _first_line(message: str) -> str:
    return message.partition("\n")[0]


def _any_token(mask: bytes, rng: random.Random) -> int | None:
    """Return a random token that a mask allows; None: it allows none."""
    places = [i for i, byte in enumerate(mask) if byte]
    if not places:
        return None
    place = rng.choice(places)
    return place * 8 + rng.choice([bit for bit in range(8) if mask[place] >> bit & 1])
