"""Thoughts: what a base model writes between its own marks before it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

BEGIN, END = "<think>", "</think>"
#: A template that opens a thought ends with the mark, or with the mark and blanks in one token.
_MAX_AT_END = 2


class ThoughtMarks(NamedTuple):
    """The ids of the tokens around a thought."""

    begin: int
    end: int

    @classmethod
    def of(cls, added: Mapping[str, int]) -> ThoughtMarks | None:
        """Return the marks among added tokens; None: the model does not write thoughts apart."""
        begin, end = map(added.get, (BEGIN, END))
        return None if begin is None or end is None else cls(begin, end)

    def is_closed(self, prompt: Sequence[int]) -> bool:
        """Return whether the template has ended the thought already: there is to be none."""
        return self.end in prompt[-_MAX_AT_END:]

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Return whether the template has begun a thought, so that the answer continues it."""
        at_end = list(prompt[-_MAX_AT_END:])
        return self.begin in at_end and self.end not in at_end
