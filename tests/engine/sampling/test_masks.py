"""Masks that requests share, and masks that threads compute."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from engine import BadGrammar
from engine.grammar_text import Grammar, GrammarKind
from engine.sampling.grammar import GrammarCompiler, Matcher
from engine.sampling.masks import MAX_FEW, Mask, MaskThreads, MaskTree
from tests.schema_cases import ENFORCED

pytest.importorskip("outlines")  # GPU machines do not have it


def allowed(mask: bytes | np.ndarray) -> list[int]:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0].tolist()


def test_places_are_told_apart_by_the_tokens_before_them_and_bounded() -> None:
    first, one_mask, x = (Mask.of(bytes(4)) for _ in range(3))
    tree = MaskTree(first, 1)
    one, other = tree.behind(0, 7), tree.behind(0, 8)
    assert one != other and tree.behind(0, 7) == one
    assert tree.behind(one, 8) not in (one, other)
    tree.put(one, one_mask)
    assert (tree.get(0), tree.get(one), tree.get(other)) == (first, one_mask, None)
    place = one
    for token_id in range(10_000):
        tree.put(place := tree.behind(place, token_id), x)
        tree.get(0)  # is used, and so stays
    assert tree.get(0) is first and tree.get(one) is None
    assert len(tree._places) <= 256 and len(tree._masks) <= 32
    assert tree.behind(0, 7) != one, "a place that is forgotten never comes back as another"


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 31, 32, 33, 500])
def test_few_are_the_allowed_tokens_if_they_are_few(count: int) -> None:
    """Spread over the vocabulary, or together in a few words."""
    chance = random.Random(count)
    for most in (40, 1024):
        for _ in range(20):
            tokens = sorted(chance.sample(range(most), min(count, most)))
            bits = np.zeros(1024, np.uint8)
            bits[tokens] = 1
            mask = Mask.of(np.packbits(bits, bitorder="little").tobytes())
            assert mask.few == (tuple(tokens) if 0 < len(tokens) <= MAX_FEW else None)


@pytest.mark.parametrize("count", [30, 32, 34])
def test_a_mask_is_written_into_more_and_fewer_words(count: int) -> None:
    own = np.arange(1, 33, dtype=np.int32)
    words = np.full(count, -1, np.int32)
    Mask(own, b"").write(words)
    assert words.tolist() == [*own.tolist(), 0, 0][:count]


def test_masks_from_threads_and_from_others_are_those_of_a_matcher_alone(tiny_model: Path) -> None:
    compiler, threads = GrammarCompiler(tiny_model), MaskThreads()
    threads._num_threads = 3
    own: list[Matcher] = []
    alone: list[Matcher] = []
    for case in list(ENFORCED.values())[::3]:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(case.schema))
        try:
            own += [compiler.submit(grammar).result() for _ in range(2)]
            alone += [compiler.submit(grammar, "alone").result() for _ in range(2)]
        except BadGrammar:  # the control plane rewrites such schemas first
            continue
    chance, num_shared = random.Random(0), 0
    pairs = list(zip(own, alone, strict=True))
    for _ in range(12):
        threads.compute(matcher for matcher, _ in pairs)
        going, masks = [], [matcher.mask for matcher, _ in pairs]
        num_shared += len(masks) - len({id(mask) for mask in masks})
        for (matcher, other), mask in zip(pairs, masks, strict=True):
            expected = allowed(other.inner.compute_bitmask())
            assert allowed(mask.words) == expected
            assert mask.few == (tuple(expected) if len(expected) <= MAX_FEW else None)
            token_id = expected[0] if len(expected) < 5 else chance.choice(expected)
            is_over = matcher.accept(token_id)
            assert other.accept(token_id) == is_over
            if not is_over:
                going.append((matcher, other))
        pairs = going
    assert num_shared > 10
    assert threads._executor is not None, "no step had use for threads"
    compiler.close()
