"""Thoughts: what a base model writes between its own marks before it answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from engine.text.answer_text import Detokenizer
from engine.text.token_pieces import TokenPieces


class Names(NamedTuple):
    """The names of the tokens around a thought, and the line behind the first, if there is one."""

    begin: str
    end: str
    line: str = ""


#: Gemma 4's are the second.
_KNOWN = (Names("<think>", "</think>"), Names("<|channel>", "<channel|>", "thought\n"))
#: A template that opens a thought ends with the mark, or with the mark and blanks in one token.
_MAX_AT_END = 2


class Part(enum.Enum):
    """The part of an answer to which a token belongs; of a mark nothing is shown."""

    THOUGHT = "thought"
    MARK = "mark"
    TEXT = "text"


class AnswerReader(Protocol):
    """Reads an answer token by token.

    thought_tokens  of those that were read: tokens of thoughts, with the marks around them
    shown           text to show before what the last token says; the reader's caller takes it
    """

    thought_tokens: int
    shown: str

    def read(self, token_id: int) -> Part: ...

    def finish(self) -> str:
        """Return the text to show behind an answer that the model has ended."""


class Thoughts(Protocol):
    """The way in which a base model tells its thoughts from its answer."""

    def reader(self, prompt: Sequence[int], *, calls: bool = False) -> AnswerReader:
        """Return a reader of the answer to a prompt.

        calls  whether tools may be called; see `AnswerReader.shown`
        """

    def thought_length(self, answer: Sequence[int]) -> int:
        """Return how many tokens at an answer's beginning are its thought, with its marks."""

    def skipped(self, prompt: Sequence[int]) -> str:
        """Return what has to follow a prompt for an answer without a thought to begin."""


class ThoughtMarks(NamedTuple):
    """`Thoughts` between two tokens, before the answer."""

    begin: int
    end: int
    names: Names
    pieces: TokenPieces

    @classmethod
    def of(cls, added: Mapping[str, int], pieces: TokenPieces) -> ThoughtMarks | None:
        """Return the marks among added tokens; None: the model does not write thoughts apart."""
        for names in _KNOWN:
            begin, end = added.get(names.begin), added.get(names.end)
            if begin is not None and end is not None:
                return cls(begin, end, names, pieces)
        return None

    def is_closed(self, prompt: Sequence[int]) -> bool:
        """Return whether the template has ended the thought already: there is to be none."""
        return self.end in prompt[-_MAX_AT_END:]

    def is_open(self, prompt: Sequence[int]) -> bool:
        """Return whether the template has begun a thought, so that the answer continues it."""
        at_end = list(prompt[-_MAX_AT_END:])
        return self.begin in at_end and self.end not in at_end

    def reader(self, prompt: Sequence[int], *, calls: bool = False) -> AnswerReader:
        return _MarksReader(self, self.is_open(prompt))

    def thought_length(self, answer: Sequence[int]) -> int:
        return list(answer).index(self.end) + 1 if self.end in answer else 0

    def skipped(self, prompt: Sequence[int]) -> str:
        return f"\n{self.names.end}\n\n" if self.is_open(prompt) else ""


class _MarksReader:
    def __init__(self, marks: ThoughtMarks, is_thinking: bool) -> None:
        self.thought_tokens, self.shown = 0, ""
        self._marks, self._is_thinking = marks, is_thinking
        self._is_blank = True  # no text yet, so that a thought may still begin
        self._line = ""  # what is left of the line behind the mark
        self._detokenizer = Detokenizer(marks.pieces)

    def read(self, token_id: int) -> Part:
        if self._is_thinking:
            self.thought_tokens += 1
            self._is_thinking = token_id != self._marks.end
            text = self._marks.pieces.of(token_id, is_first=False).text
            if self._line and self._line.startswith(text):
                self._line = self._line[len(text) :]
                return Part.MARK
            self._line = ""
            return Part.THOUGHT if self._is_thinking else Part.MARK
        if not self._is_blank:
            return Part.TEXT
        if token_id == self._marks.begin and not self.thought_tokens:
            self.thought_tokens, self._is_thinking, self._line = 1, True, self._marks.names.line
            return Part.MARK
        text = self._detokenizer.feed(token_id)
        # Blanks between a thought and its answer are no part of either.
        if self.thought_tokens and text.isspace():
            return Part.MARK
        self._is_blank = not text.strip()
        return Part.TEXT

    def finish(self) -> str:
        return ""
