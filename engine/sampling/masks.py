"""Masks of grammars: kept for the requests that come to the same place, computed on many threads.

llguidance does not name the states of its automaton. Two requests are at the same place for certain
if their grammar and their tokens so far are the same; so that is the key.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

#: Largest number of places of one grammar whose requests are told apart, and of masks that are
#: kept.
_MAX_PLACES = 256
_MAX_MASKS = 32
#: Largest number of allowed tokens that counts as few.
MAX_FEW = 8
#: Number of masks from which they are computed on threads: threads take some 10 us to wake.
_LEAST = 4
_MAX_THREADS = 8


class Mask:
    """The tokens that a grammar allows next.

    words   [ceil(V / 32)] int32, one bit each; may be longer
    filled  a bit for each word, as `_filled`
    """

    __slots__ = ("_few", "_filled", "words")

    def __init__(self, words: npt.NDArray[np.int32], filled: bytes) -> None:
        self.words, self._filled = words, filled
        self._few: tuple[int, ...] | None = ()  # not looked for yet: only drafts ask

    @classmethod
    def of(cls, bits: bytes) -> Mask:
        """Make one of llguidance's bytes."""
        words = np.frombuffer(bits, dtype=np.int32)
        return cls(words, _filled(words).tobytes())

    @property
    def few(self) -> tuple[int, ...] | None:
        """The tokens that are allowed; None if they are many, or none."""
        few = self._few
        if few == ():
            few = self._few = few_of(self.words, self._filled)
        return few

    def write(self, words: npt.NDArray[np.int32]) -> None:
        """Write it into `words` [ceil(V / 32)], which may be longer or shorter."""
        if len(words) == len(self.words):
            words[:] = self.words
            return
        count = min(len(self.words), len(words))
        words[:count] = self.words[:count]
        words[count:] = 0


def _filled(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """[..., W] -> a bit for each word, 1 if it is not 0: numpy counts them ten times as slowly."""
    return np.packbits(words != 0, axis=-1, bitorder="little")


def few_of(words: npt.NDArray[np.int32], filled: bytes) -> tuple[int, ...] | None:
    """Return the tokens that a mask allows; None if they are many, or none.

    filled  the bits of `_filled`
    """
    left = int.from_bytes(filled, "little")
    if not 0 < left.bit_count() <= MAX_FEW:
        return None
    few: list[int] = []
    values, room = words.data, MAX_FEW  # a view gives numbers in half of the time
    while left:
        index = left.bit_length() - 1
        left ^= 1 << index
        bits = values[index] & 0xFFFFFFFF
        room -= bits.bit_count()
        if room < 0:
            return None
        while bits:
            highest = bits.bit_length() - 1
            bits ^= 1 << highest
            few.append(32 * index + highest)
    few.reverse()
    return tuple(few)


class Masked(Protocol):
    """A place in a grammar: `engine.sampling.grammar.Matcher`."""

    tree: MaskTree

    @property
    def key(self) -> Hashable:
        """The same only for those that have the same mask."""

    @property
    def inner(self) -> Any: ...
    @property
    def knows_mask(self) -> bool: ...

    def note_mask(self, mask: Mask) -> None: ...


class MaskTree:
    """The masks at one grammar's places, those used last, for all requests that have the grammar.

    A place is a number; the beginning is 0. Places and masks that were not used for long go.

    first      the mask at the beginning
    num_words  of the vocabulary; a mask may have more
    """

    def __init__(self, first: Mask | None = None, num_words: int = 0) -> None:
        self.num_words = num_words
        self._places: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._masks: OrderedDict[int, Mask] = OrderedDict()
        self._num_places = 1
        if first is not None:
            self.put(0, first)

    def behind(self, place: int, token_id: int) -> int:
        """Return the place behind a token."""
        key = place, token_id
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = self._num_places
            self._num_places += 1
            if len(self._places) > _MAX_PLACES:
                _, gone = self._places.popitem(last=False)
                self._masks.pop(gone, None)
        else:
            self._places.move_to_end(key)
        return found

    def get(self, place: int) -> Mask | None:
        mask = self._masks.get(place)
        if mask is not None:
            self._masks.move_to_end(place)
        return mask

    def put(self, place: int, mask: Mask) -> None:
        if place in self._masks:
            self._masks.move_to_end(place)
        self._masks[place] = mask
        if len(self._masks) > _MAX_MASKS:
            self._masks.popitem(last=False)


class MaskThreads:
    """Computes the masks of a step on threads, outside the interpreter's lock."""

    def __init__(self) -> None:
        self._num_threads = min(os.cpu_count() or 1, _MAX_THREADS)
        self._executor: Any = None  # made with the first step that has use for it
        # Kept: new memory of this size would be mapped, page by page, for every call.
        self._words = np.empty((0, 0), np.int32)

    def compute(self, matchers: Iterable[Masked]) -> None:
        """Compute the masks that are not known yet, each place's once."""
        missing = {matcher.key: matcher for matcher in matchers if not matcher.knows_mask}
        if not self._has_use(len(missing)):
            return
        own = list(missing.values())
        words = self._room_for(len(own), own[0].tree.num_words)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher.inner, i) for i, matcher in enumerate(own)],
            words.ctypes.data,
            words.shape[1] * words.itemsize,
            len(own),
        )
        filled = _filled(words)
        width, bits = filled.shape[1], filled.tobytes()
        for i, matcher in enumerate(own):
            row = words[i].copy()
            matcher.note_mask(Mask(row, bits[i * width : (i + 1) * width]))

    def _room_for(self, count: int, num_words: int) -> npt.NDArray[np.int32]:
        """Return room for masks; what it held before is lost."""
        if self._words.shape[0] < count or self._words.shape[1] != num_words:
            self._words = np.empty((count, num_words), np.int32)
        return self._words[:count]

    def consume(self, tokens: list[tuple[Any, int]]) -> bool:
        """Let llguidance's matchers take one token each; return whether they have.

        Few are left to the caller. One that cannot be followed is in error.
        """
        if not self._has_use(len(tokens)):
            return False
        self._executor.consume_token_par(tokens)
        return True

    def _has_use(self, count: int) -> bool:
        """Return whether threads save time for this number of matchers; make them if so."""
        if self._num_threads < 2 or count < _LEAST:
            return False
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor(self._num_threads)
        return True
