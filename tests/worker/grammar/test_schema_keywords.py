"""What the linter says of a keyword is what the decoder does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from controlplane.schemas import Status, plan
from controlplane.schemas.plan import HANDLERS
from engine.grammar_text import Grammar, GrammarKind
from engine.sampling.grammar import GrammarCompiler, Matcher
from tests.schema_cases import CHECKED, ENFORCED, UNSUPPORTED, Case
from tests.tiny_base import write_tiny_base

VALIDATOR = jsonschema.Draft202012Validator
NUM_WALKS, MAX_TOKENS = 4, 300


class Decoder:
    """Says what the decoder lets through, byte pairs for tokens."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._compiler = GrammarCompiler(folder)
        self._words = np.zeros(-(-self._tokenizer.get_vocab_size() // 32), np.int32)

    def close(self) -> None:
        self._compiler.close()

    def matcher(self, schema: str) -> Matcher:
        return self._compiler.submit(Grammar(GrammarKind.JSON_SCHEMA, schema)).result(30)

    def allowed(self, matcher: Matcher) -> list[int]:
        matcher.fill_mask(self._words)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little")
        return [int(token_id) for token_id in np.flatnonzero(bits)]

    def takes(self, schema: str, value: Any) -> bool:
        """Whether the value, written plainly, is an answer."""
        matcher = self.matcher(schema)
        text = json.dumps(value, ensure_ascii=False)
        for token_id in self._tokenizer.encode(text, add_special_tokens=False).ids:
            if token_id not in self.allowed(matcher):
                return False
            matcher.accept(token_id)
        return matcher.eos_token_id in self.allowed(matcher)

    def walk(self, schema: str, seed: int) -> str | None:
        """Some answer; None when it did not end in time. Ends are preferred to more of it."""
        rng, matcher, token_ids = random.Random(seed), self.matcher(schema), []
        for _ in range(MAX_TOKENS):
            allowed = self.allowed(matcher)
            ends = [i for i in allowed if self._tokenizer.id_to_token(i) in {'"', "}", "]"}]
            if matcher.eos_token_id in allowed and rng.random() < 0.5:
                return str(self._tokenizer.decode(token_ids))
            likely = ends if ends and rng.random() < 0.4 else allowed
            token_ids.append(
                rng.choice([i for i in likely if i != matcher.eos_token_id] or allowed)
            )
            if token_ids[-1] == matcher.eos_token_id or matcher.accept(token_ids[-1]):
                return str(self._tokenizer.decode(token_ids))
        return None


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    made = Decoder(write_tiny_base(tmp_path_factory.mktemp("tiny")))
    yield made
    made.close()


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    return VALIDATOR(schema, format_checker=VALIDATOR.FORMAT_CHECKER).is_valid(value)


@pytest.mark.parametrize("name", ENFORCED)
def test_what_is_enforced_is_enforced(decoder: Decoder, name: str) -> None:
    case: Case = ENFORCED[name]
    planned = plan(case.schema)
    assert not planned.with_status(Status.CHECKED, Status.UNSUPPORTED)
    for value in case.good:
        assert is_valid(case.schema, value), value
        assert decoder.takes(planned.decoding, value), value
    for value in case.bad:
        assert not decoder.takes(planned.decoding, value), value
    answers = [decoder.walk(planned.decoding, seed) for seed in range(NUM_WALKS)]
    for answer in answers:
        if answer is not None:
            assert is_valid(case.schema, json.loads(answer)), answer


@pytest.mark.parametrize("name", CHECKED)
def test_what_is_checked_is_not_enforced(decoder: Decoder, name: str) -> None:
    case = CHECKED[name]
    planned = plan(case.schema)
    assert name in [finding.path[1:] for finding in planned.with_status(Status.CHECKED)]
    assert not planned.with_status(Status.UNSUPPORTED)
    for value in (*case.good, *case.bad):
        assert decoder.takes(planned.decoding, value), value
        assert is_valid(case.schema, value) == (value in case.good)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_unsupported_stops_nothing(decoder: Decoder, name: str) -> None:
    planned = plan(UNSUPPORTED[name])
    assert name in [finding.keyword for finding in planned.with_status(Status.UNSUPPORTED)]
    decoder.matcher(planned.decoding)


def test_every_keyword_has_a_case() -> None:
    found: dict[str, set[Status]] = {}
    for schema in (
        *(case.schema for case in ENFORCED.values()),
        *(case.schema for case in CHECKED.values()),
        *UNSUPPORTED.values(),
    ):
        for finding in plan(schema).findings:
            found.setdefault(finding.keyword, set()).add(finding.status)
    missing = HANDLERS.keys() - found.keys()
    assert missing <= {
        "$vocabulary", "$recursiveRef", "additionalItems", "contentEncoding", "contentMediaType",
        "contentSchema", "discriminator", "divisibleBy", "example", "externalDocs", "writeOnly",
        "xml",
    }  # fmt: skip
    assert len(ENFORCED) >= 60
