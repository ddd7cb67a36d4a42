"""Read the calls of tools in a model's text while it is written. Standard library only.

A worker's grammar makes the model keep this form (`worker/grammar/answers.py`), or the worker
rewrites what gpt-oss writes: each call is between `CALL_BEGIN` and `CALL_END`, a JSON object of the
function's name and then its arguments. The gateway shows the calls as they are read here, and the
worker checks them so.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from contract.messages.protocol import CALL_BEGIN, CALL_END
from contract.strict_json import is_too_deep

#: Characters that may stand before the first call.
BLANKS = " \t\n\r"
_BEGIN, _END = CALL_BEGIN.strip(), CALL_END.strip()
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]{1,64})"\s*,\s*"arguments"\s*:\s*')
_TAIL = re.compile(r"\s*\}\s*" + re.escape(_END))


def read_arguments(text: str) -> Any:
    """Parse an earlier call's arguments for a chat template.

    Returns their text if it cannot be handed on: no JSON, too deep, or with a lone surrogate or an
    infinite number.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    return text if is_too_deep(value) else value


class CalledFunctions:
    """The functions that a conversation has called so far, by the ids of their calls.

    Some clients number the calls of each message from the start, so an id means its latest call.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def add(self, calls: Iterable[Mapping[str, Any]]) -> None:
        """Add a message's calls, in the form for a chat template."""
        self._names |= {call["id"]: call["function"]["name"] for call in calls}

    def name_of(self, call_id: Any) -> str | None:
        """Return the function that produced a tool's result; None: no call has the id."""
        return self._names.get(call_id) if isinstance(call_id, str) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text for the message's content, or for call number `call`.

    name  of the function, in a call's first piece
    """

    text: str
    call: int | None = None
    name: str | None = None
    call_id: str | None = None


class ObjectEnd:
    """Finds the end of a JSON object whose text comes in pieces.

    is_found  whether it has ended
    """

    def __init__(self) -> None:
        self.is_found = False
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    def find(self, text: str) -> int:
        """Return where in `text`, the next piece, the object ends; its length, if it does not."""
        for at, character in enumerate(text):
            if self._is_in_string:
                self._is_in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_found = True
                    return at + 1
        return len(text)


class CallReader:
    """Reads one choice's text. `num_calls`: those whose names are known."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._unread = ""
        self._state = self._at_start
        self._arguments = ObjectEnd()

    def feed(self, text: str) -> list[Piece]:
        """Return what more text adds; the text's end is held back if it may be part of a mark."""
        self._unread += text
        pieces: list[Piece] = []
        while True:
            state = self._state
            pieces += state()
            if self._state == state:
                return pieces

    def finish(self) -> list[Piece]:
        """Return the text that was held back, at the end of the answer."""
        is_text = self._state in (self._at_start, self._in_text)
        text, self._unread = self._unread, ""
        return [Piece(text)] if text and is_text else []

    # The states: each reads its part, and sets `_state` to the next one

    def _at_start(self) -> Iterator[Piece]:
        text = self._unread.lstrip(BLANKS)
        if text.startswith(_BEGIN):
            self._unread = text[len(_BEGIN) :]
            self._state = self._before_arguments
        elif text and not _BEGIN.startswith(text):
            self._state = self._in_text
        yield from ()

    def _in_text(self) -> Iterator[Piece]:
        text, self._unread = self._unread, ""
        if text:
            yield Piece(text)

    def _before_arguments(self) -> Iterator[Piece]:
        head = _HEAD.match(self._unread)
        if head is None or head.end() == len(self._unread):
            return  # the arguments' first character decides where the blanks end
        self._unread = self._unread[head.end() :]
        self.num_calls += 1
        self._arguments = ObjectEnd()
        self._state = self._in_arguments
        call_id = f"call_{secrets.token_hex(12)}"
        yield Piece("", call=self.num_calls - 1, name=head[1], call_id=call_id)

    def _in_arguments(self) -> Iterator[Piece]:
        text = self._unread
        end = self._arguments.find(text)
        piece, self._unread = text[:end], text[end:]
        if piece:
            yield Piece(piece, call=self.num_calls - 1)
        if self._arguments.is_found:
            self._state = self._after_arguments

    def _after_arguments(self) -> Iterator[Piece]:
        tail = _TAIL.match(self._unread)
        if tail is not None:
            rest = self._unread[tail.end() :].lstrip()
            if rest.startswith(_BEGIN):
                self._unread = rest[len(_BEGIN) :]
                self._state = self._before_arguments
        yield from ()


def read_calls(text: str) -> list[tuple[str, str]]:
    """Return the function's name and arguments, as JSON text, of each call in an answer."""
    reader = CallReader()
    calls: list[tuple[str, list[str]]] = []
    for piece in [*reader.feed(text), *reader.finish()]:
        if piece.name is not None:
            calls.append((piece.name, []))
        elif piece.call is not None:
            calls[piece.call][1].append(piece.text)
    return [(name, "".join(pieces)) for name, pieces in calls]
