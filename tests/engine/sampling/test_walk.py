"""Drafts move llguidance's matcher on; a matcher that is copied for every look is the reference."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import BadGrammar
from engine.grammar_text import Grammar, GrammarKind
from engine.sampling.grammar import GrammarCompiler, Matcher
from engine.sampling.masks import MaskThreads
from engine.sampling.walk import Track
from tests.schema_cases import ENFORCED

pytest.importorskip("outlines")  # GPU machines do not have it

#: llguidance cannot take back a token of this one.
ONE_WAY = Grammar(GrammarKind.LARK, 'start: word ("," word)*\nword[max_tokens=3]: /[a-z]+/\n')


def allowed(inner: Any) -> list[int]:
    bits = np.unpackbits(np.frombuffer(inner.compute_bitmask(), np.uint8), bitorder="little")
    return bits.nonzero()[0].tolist()


def moved(inner: Any, tokens: list[int]) -> Any:
    copy = inner.deep_copy()
    assert copy.try_consume_tokens(tokens) == len(tokens)
    return copy


def same_mask(words: np.ndarray, inner: Any) -> bool:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return bits.nonzero()[0].tolist() == allowed(inner.deep_copy())


def draft(matcher: Matcher, plain: Any, chance: random.Random) -> list[int]:
    """Walk over forced, legal and illegal tokens; every look is that of a copy."""
    drafts: list[int] = []
    walk = matcher.walk()
    assert walk is not None
    for _ in range(chance.randrange(4)):
        place = moved(plain, drafts)
        forced = walk.forced()
        assert forced == place.deep_copy().compute_ff_tokens()
        legal = allowed(place.deep_copy())
        if chance.random() < 0.5:
            few = walk.few_allowed()
            assert few == (tuple(legal) if len(legal) <= 8 else None)
        tokens = forced or [chance.choice(legal)]
        if chance.random() < 0.1:
            tokens = [next(t for t in range(257) if t not in legal)] if len(legal) < 257 else tokens
        if not walk.accept(*tokens):
            break
        drafts += tokens
    return drafts


@pytest.mark.parametrize("has_threads", [False, True])
def test_a_request_follows_drafts_or_leaves_them(tiny_model: Path, has_threads: bool) -> None:
    compiler, threads = GrammarCompiler(tiny_model), MaskThreads()
    cases = [json.dumps(case.schema) for case in list(ENFORCED.values())[has_threads::6]]
    grammars = [ONE_WAY, *(Grammar(GrammarKind.JSON_SCHEMA, text) for text in cases)]
    followed = left = 0
    for number, grammar in enumerate(grammars):
        chance = random.Random(number)
        try:
            matcher = compiler.submit(grammar).result()
        except BadGrammar:  # the control plane rewrites such schemas first
            continue
        plain = matcher.inner.deep_copy()
        for _ in range(25):
            drafts = draft(matcher, plain, chance) if chance.random() < 0.7 else []
            known = matcher.masks_ahead(drafts)
            for i, mask in enumerate(known or ()):
                if mask is not None:
                    assert same_mask(mask.words, moved(plain, drafts[: i + 1]))
            if drafts and (end := matcher.behind(drafts)) is not None:
                if has_threads:
                    threads._num_threads = 2
                    threads.compute([end])
                mask = end.compute()
                assert mask is not None and same_mask(mask.words, moved(plain, drafts))
            words = np.zeros(len(matcher.mask.words), np.int32)
            matcher.fill_mask(words)
            assert same_mask(words, plain)
            legal = allowed(plain.deep_copy())
            for wished in drafts or [-1]:
                is_right = wished in legal and chance.random() < 0.8
                token_id = wished if is_right else chance.choice(legal)
                followed, left = followed + is_right, left + (wished >= 0 and not is_right)
                plain.consume_token(token_id)
                is_over = matcher.accept(token_id)
                assert is_over == plain.is_stopped()
                if token_id != wished or is_over:
                    break
                legal = allowed(plain.deep_copy())
            if is_over:
                break
    assert followed > 60 and left > 15
    compiler.close()


class Costly:
    """llguidance's matcher whose fuel is spent behind some tokens."""

    def __init__(self, most: int, taken: tuple[int, ...] = (), can_roll_back: bool = True) -> None:
        self.most, self.taken, self.can_roll_back = most, taken, can_roll_back

    def deep_copy(self) -> Costly:
        return Costly(self.most, self.taken, self.can_roll_back)

    def is_error(self) -> bool:
        return len(self.taken) > self.most

    def is_stopped(self) -> bool:
        return self.is_error()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        before = len(self.taken)
        self.taken = (*self.taken, *tokens)[: self.most + 1]
        return min(len(tokens), self.most - before)

    def rollback(self, count: int) -> bool:
        self.taken = self.taken[: len(self.taken) - count]
        return self.can_roll_back

    def consume_tokens(self, tokens: list[int]) -> None:
        self.taken = (*self.taken, *tokens)

    def consume_token(self, token: int) -> None:
        self.consume_tokens([token])


@pytest.mark.parametrize("can_roll_back", [True, False])
def test_a_draft_that_is_too_costly_costs_the_request_nothing(can_roll_back: bool) -> None:
    track = Track(Costly(3, can_roll_back=can_roll_back))
    track.begin()
    assert track.go_on((1, 2))
    track.take(1)
    assert not track.go_on((5, 6))
    assert not track.has_failed() and track.end.taken == (1,) and track.ahead == []
    assert not track.go_on((2,)), "it went on from another place than that of the drafts before"
    track.take(7)
    assert track.end.taken == (1, 7) and not track.has_failed()
    track.take(8)
    track.take(9)
    assert track.has_failed()


@pytest.mark.parametrize("can_roll_back", [True, False])
def test_a_request_of_any_length_leaves_its_drafts(can_roll_back: bool) -> None:
    track = Track(Costly(1000, can_roll_back=can_roll_back))
    taken: list[int] = []
    for number in range(300):
        track.begin()
        assert track.go_on((number, -1, -2))
        assert track.here().taken == (*taken,) and track.here(2).taken == (*taken, number, -1)
        for token_id in (number, number % 3 - 1):
            track.take(token_id)
            taken.append(token_id)
            if track.ahead:
                assert track.here().taken == (*taken,)
    track.go_back()
    assert track.end.taken == (*taken,)
