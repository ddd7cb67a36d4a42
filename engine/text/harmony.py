"""Harmony: an answer of gpt-oss is several messages, whose channel says what each is for.

    <|start|>assistant<|channel|>analysis<|message|>a thought<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>the answer<|return|>

A call's text is told in the form of `contract.messages.tool_calls`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from contract.messages.protocol import CALL_BEGIN, CALL_END
from engine.text.thoughts import AnswerReader, Part
from engine.text.token_pieces import TokenPieces

START, END, CHANNEL, MESSAGE = "<|start|>", "<|end|>", "<|channel|>", "<|message|>"
_ENDS = (END, "<|return|>", "<|call|>")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([a-zA-Z0-9_-]{1,64})(?![\w.-])")


class Harmony(NamedTuple):
    """`engine.text.thoughts.Thoughts` of gpt-oss."""

    start: int
    message: int
    ends: frozenset[int]
    pieces: TokenPieces

    @classmethod
    def of(cls, added: Mapping[str, int], pieces: TokenPieces) -> Harmony | None:
        """Return the format if all its marks are among added tokens."""
        marks = [added.get(name) for name in (START, MESSAGE, *_ENDS)]
        known = [mark for mark in marks if mark is not None]
        if len(known) < len(marks) or CHANNEL not in added:
            return None
        return cls(known[0], known[1], frozenset(known[2:]), pieces)

    def reader(self, prompt: Sequence[int], *, calls: bool = False) -> AnswerReader:
        return _HarmonyReader(self, _last_message(self, prompt), calls)

    def thought_length(self, answer: Sequence[int]) -> int:
        reader, length = _HarmonyReader(self, [], False), 0
        for place, token_id in enumerate(answer, start=1):
            if reader.read(token_id) is Part.TEXT:
                break
            length = place if token_id in self.ends else length
        return length

    def skipped(self, prompt: Sequence[int]) -> str:
        is_begun = self.message in _last_message(self, prompt)
        return "" if is_begun else f"{CHANNEL}final{MESSAGE}"


def _last_message(marks: Harmony, prompt: Sequence[int]) -> list[int]:
    """Return the tokens of the message that a prompt leaves open."""
    found: list[int] = []
    for token_id in reversed(prompt):
        if token_id in marks.ends:
            return []
        if token_id == marks.start:
            return found[::-1]
        found.append(token_id)
    return []


class _HarmonyReader:
    def __init__(self, marks: Harmony, begun: list[int], calls: bool) -> None:
        self._marks, self._calls = marks, calls
        self._header: list[int] | None = []  # None: the message's text has begun
        self._part, self._has_text, self._is_call = Part.MARK, False, False
        self.thought_tokens, self.shown = 0, ""
        self._header_tokens = 0  # without those of the prompt
        for token_id in begun:
            self.read(token_id)
        self.thought_tokens = self._header_tokens = 0

    def read(self, token_id: int) -> Part:
        if self._header is not None:
            self._header.append(token_id)
            self._header_tokens += 1
            if token_id == self._marks.message:
                self._begin(self._header)
            return Part.MARK
        if self._part is Part.THOUGHT:
            self.thought_tokens += 1
        if token_id in self._marks.ends or token_id == self._marks.start:
            self.shown += self.finish()
            self._header, self._header_tokens = [], 0
            return Part.MARK
        return self._part

    def _begin(self, header: list[int]) -> None:
        """Begin a message's text, as its header says."""
        text = "".join(self._marks.pieces.of(each, is_first=False).text for each in header)
        channel, function = _CHANNEL.search(text), _FUNCTION.search(text)
        self._header = None
        if function is None and channel is not None and channel[1] == "analysis":
            self._part = Part.THOUGHT
            self.thought_tokens += self._header_tokens
            return
        if self._has_text:
            self.shown += "\n\n"
        self._part, self._has_text = Part.TEXT, True
        if function is not None and self._calls:
            self._is_call = True
            self.shown += f'{CALL_BEGIN}{{"name": {json.dumps(function[1])}, "arguments": '

    def finish(self) -> str:
        end = f"}}{CALL_END}" if self._is_call else ""
        self._is_call = False
        return end
