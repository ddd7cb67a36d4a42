"""AnswerText: an answer's text as its tokens come, up to a stop string.

The text is the UTF-8 decoding of the tokens' bytes, so it does not depend on how many tokens come
at a time. Bytes that are no character, as at an end in mid-character, become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from engine.text.token_pieces import TokenPieces


class Detokenizer:
    """Decodes token ids one by one; special tokens have no text.

    continues  the text continues another text: a space at its beginning is kept
    is_first   whether nothing of the text has come yet
    """

    __slots__ = ("_decoder", "_pieces", "is_first")

    def __init__(self, pieces: TokenPieces, *, continues: bool = False) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_first = not continues

    def feed(self, token_id: int) -> str:
        """Return the text that the token completes; an incomplete character is held back."""
        piece = self._pieces.of(token_id, is_first=self.is_first)
        if self.is_first:
            self.is_first = self._pieces.is_silent(token_id)
        return self._decoder.decode(piece.bytes)

    def finish(self) -> str:
        """Return what was held back, an incomplete character, as U+FFFD."""
        return self._decoder.decode(b"", True)


class StopStrings:
    """Cuts text at the first complete stop string; holds back text that may begin one.

    If several are complete at once, the longest counts. The result does not depend on how the text
    is cut into pieces.
    """

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to show, and the stop string that was found and cut off."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            end, start = min(found)
            return text[:start], text[start:end]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """Return the text that was held back, as no more text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - size :]):
            return size
    return 0


class AnswerText:
    """Turns an answer's tokens into its text.

    stop_string  the stop string that has ended it; None: none yet
    """

    __slots__ = ("_detokenizer", "_special_stops", "_stops", "stop_string")

    def __init__(
        self, pieces: TokenPieces, stops: Sequence[str] = (), *, continues: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(pieces, continues=continues)
        self._stops = StopStrings(stops)
        self._special_stops = pieces.special_among(stops)
        self.stop_string: str | None = None

    @property
    def is_first(self) -> bool:
        """Return whether the next token is the text's first one."""
        return self._detokenizer.is_first

    def feed(self, token_id: int) -> tuple[str, str]:
        """Return the text that the token completes, and the text that may be shown now.

        The second is cut at a stop string; no token may follow then. A special token, which is
        not part of the text, is a stop string if its name is.
        """
        if self._special_stops and (name := self._special_stops.get(token_id)):
            shown, self.stop_string = self.finish(), self.stop_string or name
            return "", shown
        piece = self._detokenizer.feed(token_id)
        shown, self.stop_string = self._stops.feed(piece)
        return piece, shown

    def finish(self) -> str:
        """Return the rest of the text, as no more tokens follow; it may end at a stop string."""
        shown, self.stop_string = self._stops.feed(self._detokenizer.finish())
        return shown if self.stop_string is not None else shown + self._stops.finish()
