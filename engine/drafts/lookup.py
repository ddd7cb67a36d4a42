"""LookupIndex: finds earlier occurrences of a sequence's last tokens in its prompt or its answer.

Source: prompt lookup decoding (Saxena, 2023). No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

#: Largest number of tokens that are compared.
LONGEST = 3
#: Number of last tokens of a prompt that are indexed.
_MAX_INDEXED = 8192
#: Number of added tokens from which they are indexed together.
_MANY = 6


class LookupIndex:
    """For each run of up to `LONGEST` tokens of one sequence, the place behind its last occurrence.

    Compares within one sequence only. A number below 0 is no token: nothing leads to it.
    """

    __slots__ = ("_behind", "_num_indexed")

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0  # positions whose next token was there when they were indexed

    def update(self, token_ids: Sequence[int]) -> None:
        """Index the tokens that were added; the last one waits until another follows it."""
        end = len(token_ids) - 1
        first = max(self._num_indexed, end - _MAX_INDEXED)
        if end - first >= _MANY and min(token_ids[first + 1 : end + 1]) >= 0:
            self._index_many(token_ids, first, end)
        else:
            for i in range(first, end):
                if token_ids[i + 1] < 0:
                    continue
                for length in range(1, min(LONGEST, i + 1) + 1):
                    self._behind[tuple(token_ids[i + 1 - length : i + 1])] = i + 1
        self._num_indexed = max(self._num_indexed, end)

    def _index_many(self, token_ids: Sequence[int], first: int, end: int) -> None:
        """Index tokens `first` to `end`, all 0 or more, in one call for each length.

        Six times as fast as one after the other: it may be a whole prompt, or what was generated
        since the last drafts, of all requests in one step.
        """
        for length in range(1, LONGEST + 1):
            low = max(first + 1 - length, 0)
            runs = zip(
                *(token_ids[low + i : end + 1 - length + i] for i in range(length)), strict=True
            )
            self._behind.update(zip(runs, range(low + length, end + 1), strict=True))

    def find(self, suffix: Sequence[int]) -> tuple[int, int] | None:
        """Find the longest end of `suffix`; return (its length, the place behind it)."""
        for length in range(min(LONGEST, len(suffix)), 0, -1):
            place = self._behind.get(tuple(suffix[-length:]))
            if place is not None:
                return length, place
        return None


class Copying:
    """Reads on from a place that was found, token by token.

    index, token_ids  the tokens that it reads, and their index
    behind            the sequence's tokens, after which it continues
    """

    def __init__(
        self, index: LookupIndex, token_ids: Sequence[int], behind: Sequence[int] | None = None
    ) -> None:
        self._index, self._token_ids = index, token_ids
        self._behind = token_ids if behind is None else behind
        self._place = len(token_ids)
        self._length = 0

    def next(self, drafted: Sequence[int]) -> tuple[int, int] | None:
        """Return (the token that may follow `drafted`, the number of tokens before it that agree).

        Continues from its place while `note` gives it the tokens there.
        """
        if self._place >= len(self._token_ids):
            suffix = [*self._behind[-LONGEST:], *drafted][-LONGEST:]
            found = self._index.find(suffix)
            if found is None:
                return None
            self._length, self._place = found
        token_id = self._token_ids[self._place]
        return None if token_id < 0 else (token_id, min(self._length, LONGEST))

    def note(self, token_id: int) -> None:
        """Note the token that was drafted, here or from elsewhere."""
        if self._place < len(self._token_ids) and self._token_ids[self._place] == token_id:
            self._place += 1
            self._length += 1
        else:
            self._place = len(self._token_ids)
