"""Thoughts: what a base model writes between its own marks before it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

_BEGIN, _END = "<think>", "</think>"
#: A template that opens a thought ends with the mark, or with the mark and blanks in one token.
_MAX_AT_END = 2


class ThoughtMarks(NamedTuple):
    """The ids of the tokens around a thought."""

    begin: int
    end: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ThoughtMarks | None:
        """Return the marks of the vocabulary; None: its model does not write thoughts apart."""
        begin, end = map(tokenizer.token_to_id, (_BEGIN, _END))
        return None if begin is None or end is None else cls(begin, end)

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Return whether the template has begun a thought, so that the answer continues it."""
        at_end = list(prompt[-_MAX_AT_END:])
        return self.begin in at_end and self.end not in at_end
