"""Where drafts come from: lookup, profiles, and walks behind a place in a grammar."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from engine import BadGrammar
from engine.drafts.lookup import Copying, LookupIndex
from engine.drafts.profile import Kind, Profile, Source
from engine.grammar_text import Grammar, GrammarKind
from engine.sampling.grammar import GrammarCompiler, Matcher
from engine.sampling.masks import MAX_FEW
from tests.schema_cases import ENFORCED

pytest.importorskip("outlines")  # GPU machines do not have it

NUM_TOKENS = 257


def test_lookup_prefers_the_longest_and_then_the_last_occurrence() -> None:
    token_ids = [1, 2, 3, 10, 9, 2, 3, 11, 3, 12, 2, 3]
    index = LookupIndex()
    index.update(token_ids)
    assert index.find([2, 3]) == (2, 7)
    assert index.find([1, 2, 3]) == (3, 3)
    assert index.find([8, 3]) == (1, 9)
    assert index.find([12]) == (1, 10)
    assert index.find([7]) is None


def test_lookup_finds_the_same_if_it_grows_token_by_token() -> None:
    chance = random.Random(0)
    token_ids = [chance.randrange(5) for _ in range(300)]
    grown, whole = LookupIndex(), LookupIndex()
    for end in range(1, len(token_ids) + 1):
        grown.update(token_ids[:end])
    whole.update(token_ids)
    for i in range(3, 300):
        assert grown.find(token_ids[i - 3 : i]) == whole.find(token_ids[i - 3 : i])


def test_copying_goes_on_behind_its_place_until_something_else_is_drafted() -> None:
    token_ids = [5, 6, 7, 8, 9, 5, 6]
    index = LookupIndex()
    index.update(token_ids)
    copying = Copying(index, token_ids)
    drafts: list[int] = []
    for expected in (7, 8, 9):
        found = copying.next(drafts)
        assert found is not None and found[0] == expected
        copying.note(expected)
        drafts.append(expected)
    copying.note(1)  # forced, say
    assert copying.next([*drafts, 1]) is None


def test_what_is_never_right_is_tried_seldom() -> None:
    profile, kind = Profile(), Kind(Source.LOOKUP, 3)
    for _ in range(40):
        profile.note(kind, is_right=False)
    assert profile.rate(kind) < 0.1
    assert sum(profile.probes(kind) for _ in range(320)) == 10


def test_choices_are_bounded() -> None:
    profile = Profile()
    for i in range(1000):
        profile.note_choice((i, (i, i + 1)), i)
    assert profile.choice((999, (999, 1000))) == (999, pytest.approx(0.7))
    assert profile.choice((0, (0, 1))) is None
    assert len(profile._choices) <= 256


def mask_of(matcher: Matcher) -> torch.Tensor:
    words = torch.zeros(-(-NUM_TOKENS // 32), dtype=torch.int32)
    matcher.fill_mask(words.numpy())
    bits = (words[:, None] >> torch.arange(32)) & 1
    return bits.flatten()[:NUM_TOKENS].bool()


def test_a_walk_leaves_the_place_as_it_is(tiny_model: Path) -> None:
    """Masks along random answers are those of a matcher on which nobody walks."""
    compiler = GrammarCompiler(tiny_model)
    num_forced = 0
    for number, case in enumerate(list(ENFORCED.values())[::4]):
        chance = random.Random(number)
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(case.schema))
        try:
            walked, plain = (compiler.submit(grammar).result() for _ in range(2))
        except BadGrammar:  # the control plane rewrites such schemas first
            continue
        for _ in range(30):
            walk = walked.walk()
            assert walk is not None
            few, forced = walk.few_allowed(), walk.forced()
            num_forced += len(forced)
            assert all(map(walk.accept, forced))
            legal = mask_of(plain)
            assert torch.equal(legal, mask_of(walked))
            allowed = legal.nonzero().flatten().tolist()
            assert few == (tuple(allowed) if len(allowed) <= MAX_FEW else None)
            token_id = chance.choice(allowed)
            if forced:
                assert token_id == forced[0] and len(allowed) == 1
            is_over = walked.accept(token_id)
            assert plain.accept(token_id) == is_over
            if is_over or token_id == plain.eos_token_id:
                break
    assert num_forced > 50
    compiler.close()
