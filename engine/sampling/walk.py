"""Places in a grammar that a request has not reached: copies that drafts move on."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from engine.sampling.masks import MaskTree

#: So many allowed tokens count as few.
MAX_FEW = 8


class _Owner(Protocol):
    """A request's place in its grammar: `engine.sampling.grammar.Matcher`."""

    inner: Any

    @property
    def mask(self) -> bytes: ...


class Walk:
    """A place in a grammar behind drafts: a copy of a request's, which stays where it is.

    If the copy turns out too costly to follow, nothing more is forced or allowed.

    ahead  the tokens that it moves on by, and the mask behind each, where it was computed: the
           owner need not compute those again
    """

    def __init__(self, owner: _Owner, ahead: list[tuple[int, bytes | None]]) -> None:
        self._owner, self._ahead = owner, ahead
        self._own_copy: Any = None  # made once it is needed
        self._few: tuple[int, ...] | None = None
        self._is_counted = False  # whether `_few` is of this place

    @property
    def _copy(self) -> Any:
        if self._own_copy is None:
            self._own_copy = self._owner.inner.deep_copy()
        return self._own_copy

    def forced(self) -> list[int]:
        """Return the text that the grammar forces, as the tokenizer cuts it.

        Without its last tokens, if what follows could change them.
        """
        forced: list[int] = self._copy.compute_ff_tokens()
        return forced

    def few_allowed(self) -> tuple[int, ...] | None:
        """Return the tokens that are allowed next; None if they are many, or none."""
        if not self._is_counted:
            self._few, self._is_counted = self._count_few(), True
        return self._few

    def _count_few(self) -> tuple[int, ...] | None:
        if not self._ahead:
            return few_of(self._owner.mask)
        mask: bytes = self._copy.compute_bitmask()
        if self._copy.is_error():
            return None
        self._ahead[-1] = self._ahead[-1][0], mask
        return few_of(mask)

    def accept(self, token_id: int) -> bool:
        """Move on by a token if it is legal; return whether it is."""
        if self._copy.try_consume_tokens([token_id]) != 1:
            return False
        self._ahead.append((token_id, None))
        self._is_counted = False
        return True


class Behind:
    """A place behind drafts of which each is certain: only its mask is wanted.

    inner, tree, place  as of a `Matcher`
    mask  None: not computed
    """

    __slots__ = ("inner", "mask", "place", "tree")

    def __init__(self, inner: Any, tree: MaskTree, place: int) -> None:
        self.inner, self.tree, self.place = inner, tree, place
        self.mask: bytes | None = None

    @property
    def knows_mask(self) -> bool:
        """Whether `mask` need not be computed."""
        if self.mask is None:
            self.mask = self.tree.get(self.place)
        return self.mask is not None

    def note_mask(self, mask: bytes) -> None:
        """Note what the mask is, unless the grammar turned out too costly to follow."""
        if not self.inner.is_error():
            self.mask = mask
            self.tree.put(self.place, mask)

    def compute(self) -> bytes | None:
        """Return the mask; None if the grammar cannot be followed."""
        if not self.knows_mask and not self.inner.is_error():
            self.note_mask(self.inner.compute_bitmask())
        return self.mask


def only_of(mask: bytes) -> int | None:
    """Return the only token that a mask allows; None if they are more, or none."""
    words = np.frombuffer(mask, dtype=np.uint32)
    filled = words.nonzero()[0]
    if len(filled) != 1:
        return None
    word = int(words[filled[0]])
    return None if word & (word - 1) else int(filled[0]) * 32 + word.bit_length() - 1


def few_of(mask: bytes) -> tuple[int, ...] | None:
    """Return the tokens that a mask allows; None if they are many, or none."""
    words = np.frombuffer(mask, dtype=np.uint32)
    filled = words.nonzero()[0]
    if not 0 < len(filled) <= MAX_FEW:
        return None
    bits = np.unpackbits(words[filled].view(np.uint8), bitorder="little").reshape(-1, 32)
    rows, columns = bits.nonzero()
    if len(rows) > MAX_FEW:
        return None
    return tuple((filled[rows] * 32 + columns).tolist())
