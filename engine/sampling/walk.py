"""Places in a grammar that a request has not reached: drafts move on to them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from engine.sampling.masks import Mask, MaskTree

#: Number of a request's tokens after which drafts make the copy of its matcher again.
_MAX_SINCE = 64


class Track:
    """llguidance's matcher of one request, which drafts move on beyond the request's place.

    The request follows without a call of llguidance while it takes the tokens of the drafts. If it
    takes another one, the matcher is rolled back. It cannot be if a draft turned out too costly to
    follow, and in some grammars: then a copy from before takes over.

    end    llguidance's, behind all of `ahead`
    ahead  the tokens that the request has not taken
    masks  behind each of these, where it was computed
    """

    __slots__ = ("_has_begun", "_since", "_start", "ahead", "end", "masks")

    def __init__(self, inner: Any) -> None:
        self.end = inner
        self._has_begun = False  # whether drafts may have moved on since the request's last token
        self.ahead: list[int] = []
        self.masks: list[Mask | None] = []
        self._start: Any = None  # a copy; None: no draft has moved on yet
        self._since: list[int] = []  # the tokens that the request has taken since it was made

    def here(self, num_drafts: int = 0) -> Any:
        """Return llguidance's at the request's place, or behind some of `ahead`; not to be moved.

        It is in error if the grammar cannot be followed there.
        """
        if num_drafts == len(self.ahead):
            return self.end
        return self._back(self.end.deep_copy(), num_drafts)

    def begin(self) -> None:
        """Let drafts move on from the request's place."""
        self.go_back()
        self._has_begun = True
        if self._start is None or len(self._since) > _MAX_SINCE:
            self._start, self._since = self.end.deep_copy(), []

    def go_on(self, token_ids: SequenceOf[int]) -> bool:
        """Move on by drafts if all are legal; return whether they are."""
        if not self._has_begun or self.end.is_stopped():
            return False
        count = self.end.try_consume_tokens(token_ids)
        self.ahead += token_ids[:count]
        self.masks += [None] * count
        if count == len(token_ids):
            return True
        if count or self.end.is_error():
            self.go_back()
        return False

    def take(self, token_id: int) -> Mask | None:
        """Let the request take a token; return the mask behind it, if that was computed."""
        mask = None
        if self.ahead and self.ahead[0] == token_id:
            del self.ahead[0]
            mask = self.masks.pop(0)
        else:
            self.go_back()
            self.end.consume_token(token_id)
        if self._start is not None:
            self._since.append(token_id)
        self._has_begun = self._has_begun and bool(self.ahead)
        return mask

    def note_taken(self, token_id: int) -> None:
        """Note that llguidance's matcher has taken the token which `take` will bring.

        Only if nothing is `ahead`.
        """
        self.ahead, self.masks = [token_id], [None]

    def go_back(self) -> None:
        """Forget the drafts that the request has not taken."""
        if not self._has_begun:
            return
        self._has_begun = False
        if self.ahead or self.end.is_error():
            self.end = self._back(self.end, 0)
            self.ahead, self.masks = [], []

    def has_failed(self) -> bool:
        """Return whether the grammar cannot be followed at the request's place."""
        if self._has_begun and self.end.is_error():
            self.go_back()
        return bool(self.end.is_error())

    def _back(self, inner: Any, num_drafts: int) -> Any:
        """Return `inner`, which is at `end`, or another one, behind the first of `ahead`."""
        if not inner.is_error() and inner.rollback(len(self.ahead) - num_drafts):
            return inner
        inner = self._start.deep_copy()
        inner.consume_tokens(self._since + self.ahead[:num_drafts])
        return inner


class _Owner(Protocol):
    """A request's place in its grammar: `engine.sampling.grammar.Matcher`."""

    @property
    def track(self) -> Track: ...
    @property
    def tree(self) -> MaskTree: ...
    @property
    def few(self) -> tuple[int, ...] | None: ...


class Walk:
    """A place in a grammar behind drafts, from a request's place on.

    If a draft turns out too costly to follow, nothing more is forced or allowed. Another walk, or
    the request's next token, ends this one.

    tree   that of the owner; what drafts lead to is not noted there: it may be a way never gone
    """

    __slots__ = ("_owner", "_track", "tree")

    def __init__(self, owner: _Owner) -> None:
        self._owner, self._track, self.tree = owner, owner.track, owner.tree
        self._track.begin()

    @property
    def inner(self) -> Any:
        """llguidance's."""
        return self._track.end

    def forced(self) -> list[int]:
        """Return the text that the grammar forces, as the tokenizer cuts it.

        Without its last tokens, if what follows could change them.
        """
        forced: list[int] = self._track.end.compute_ff_tokens()
        return forced

    @property
    def key(self) -> int:
        """Return the same key only for this walk."""
        return id(self)

    @property
    def knows_mask(self) -> bool:
        """Return whether the mask of this place need not be computed."""
        masks = self._track.masks
        return not masks or masks[-1] is not None

    def note_mask(self, mask: Mask) -> None:
        """Note what the mask is, unless the grammar turned out too costly to follow."""
        track = self._track
        if track.end.is_error():
            track.go_back()
        else:
            track.masks[-1] = mask

    def few_allowed(self) -> tuple[int, ...] | None:
        """Return the tokens that are allowed next; None if they are many, or none."""
        if not self._track.ahead:
            return self._owner.few
        if not self.knows_mask:
            self.note_mask(Mask.of(self.inner.compute_bitmask()))
        masks = self._track.masks
        mask = masks[-1] if masks else None
        return None if mask is None else mask.few

    def accept(self, *token_ids: int) -> bool:
        """Move on by tokens if all are legal; return whether they are.

        If one of several is not, the walk is of no further use.
        """
        return self._track.go_on(token_ids)


class Behind:
    """A place after drafts: only its mask is wanted.

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
