"""Places in a grammar that a request has not reached: copies that drafts move on."""

from __future__ import annotations

from typing import Any, Protocol

from engine.sampling.masks import Mask, MaskTree


class _Owner(Protocol):
    """A request's place in its grammar: `engine.sampling.grammar.Matcher`."""

    @property
    def inner(self) -> Any: ...
    @property
    def tree(self) -> MaskTree: ...
    @property
    def few(self) -> tuple[int, ...] | None: ...


class Walk:
    """A place in a grammar behind drafts: a copy of a request's, which stays where it is.

    If the copy turns out too costly to follow, nothing more is forced or allowed.

    ahead  the tokens that it moves on by, and the mask behind each, where it was computed: the
           owner need not compute those again
    tree   that of the owner; what drafts lead to is not noted there: it may be a way never gone
    """

    __slots__ = ("_ahead", "_copy", "_owner", "tree")

    def __init__(self, owner: _Owner, ahead: list[tuple[int, Mask | None]]) -> None:
        self._owner, self._ahead = owner, ahead
        self.tree = owner.tree
        self._copy: Any = None  # made once it is needed

    @property
    def inner(self) -> Any:
        """llguidance's copy."""
        if self._copy is None:
            self._copy = self._owner.inner.deep_copy()
        return self._copy

    def forced(self) -> list[int]:
        """Return the text that the grammar forces, as the tokenizer cuts it.

        Without its last tokens, if what follows could change them.
        """
        forced: list[int] = self.inner.compute_ff_tokens()
        return forced

    @property
    def key(self) -> int:
        """Return the same key only for this walk."""
        return id(self)

    @property
    def knows_mask(self) -> bool:
        """Return whether the mask of this place need not be computed."""
        return not self._ahead or self._ahead[-1][1] is not None

    def note_mask(self, mask: Mask) -> None:
        """Note what the mask is, unless the grammar turned out too costly to follow."""
        if not self.inner.is_error():
            self._ahead[-1] = self._ahead[-1][0], mask

    def few_allowed(self) -> tuple[int, ...] | None:
        """Return the tokens that are allowed next; None if they are many, or none."""
        if not self._ahead:
            return self._owner.few
        if not self.knows_mask:
            self.note_mask(Mask.of(self.inner.compute_bitmask()))
        mask = self._ahead[-1][1]
        return None if mask is None else mask.few

    def accept(self, *token_ids: int) -> bool:
        """Move on by tokens if all are legal; return whether they are.

        If one is not, the walk is of no further use.
        """
        if self.inner.try_consume_tokens(list(token_ids)) != len(token_ids):
            return False
        self._ahead += [(token_id, None) for token_id in token_ids]
        return True


class Behind:
    """A place after drafts that are all certain: only its mask is wanted.

    inner, tree, place  as of a `Matcher`
    mask  None: not computed
    """

    __slots__ = ("inner", "mask", "place", "tree")

    def __init__(self, inner: Any, tree: MaskTree, place: int, mask: Mask | None = None) -> None:
        self.inner, self.tree, self.place, self.mask = inner, tree, place, mask

    @property
    def key(self) -> tuple[int, int]:
        """The same for all that are at this place."""
        return id(self.tree), self.place

    @property
    def knows_mask(self) -> bool:
        """Return whether `mask` need not be computed."""
        if self.mask is None:
            self.mask = self.tree.get(self.place)
        return self.mask is not None

    def note_mask(self, mask: Mask) -> None:
        """Note what the mask is, unless the grammar turned out too costly to follow."""
        if not self.inner.is_error():
            self.mask = mask
            self.tree.put(self.place, mask)

    def compute(self) -> Mask | None:
        """Return the mask; None if the grammar cannot be followed."""
        if not self.knows_mask and not self.inner.is_error():
            self.note_mask(Mask.of(self.inner.compute_bitmask()))
        return self.mask
