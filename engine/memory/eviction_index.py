"""EvictionIndex: finds the first of thousands to evict, comparing only a few. No torch here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from engine.memory.eviction import EvictionCandidate, eviction_order

T = TypeVar("T")

_Kind = tuple[int, float]  # pages, seconds to have them again
_Entry = tuple[int, int, T]  # last use, when it was added, whose


class EvictionIndex(Generic[T]):
    """Finds the member that goes first by `eviction_order`, comparing only a few.

    look  returns a member's state now; it is not pinned

    Retention values change with every step. But of two members of the same size and reload time the
    one used less recently has the lower value at any time: they are kept in that order, and only
    the first of each kind are compared. A member whose value rises is moved when it is the first
    of its kind; one whose value falls has to be added again.
    """

    def __init__(self, look: Callable[[T], EvictionCandidate[T]]) -> None:
        self._look = look
        self._kinds: dict[_Kind, list[_Entry[T]]] = {}
        self._entries: dict[T, tuple[_Kind, _Entry[T]]] = {}
        self._num_added = 0
        self.num_pages = 0  # pages of all members together

    def __contains__(self, owner: object) -> bool:
        return owner in self._entries

    def __iter__(self) -> Iterator[T]:
        return iter(self._entries)

    def add(self, owner: T) -> None:
        assert owner not in self._entries
        candidate = self._look(owner)
        kind, entry = _kind(candidate), (candidate.last_use, self._num_added, owner)
        self._num_added += 1
        insort(self._kinds.setdefault(kind, []), entry)
        self._entries[owner] = kind, entry
        self.num_pages += candidate.num_pages

    def remove(self, owner: T) -> None:
        kind, entry = self._entries.pop(owner)
        entries = self._kinds[kind]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._kinds[kind]
        self.num_pages -= kind[0]

    def first(self, now: int) -> EvictionCandidate[T] | None:
        """Return the member that goes first; None if there is none."""
        for owner in [entries[0][2] for entries in self._kinds.values()]:
            self._reposition(owner)
        heads = [self._look(entries[0][2]) for entries in self._kinds.values()]
        return eviction_order(heads, now)[0] if heads else None

    def _reposition(self, owner: T) -> None:
        while True:
            candidate = self._look(owner)
            kind, entry = self._entries[owner]
            if (kind, entry[0]) == (_kind(candidate), candidate.last_use):
                return
            self.remove(owner)
            self.add(owner)
            if kind not in self._kinds:
                return
            owner = self._kinds[kind][0][2]

    def check_integrity(self) -> None:
        """Raise AssertionError unless all are in order, and no value has fallen."""
        for kind, entries in self._kinds.items():
            assert entries == sorted(entries)
            for entry in entries:
                assert self._entries[entry[2]] == (kind, entry)
                candidate = self._look(entry[2])
                assert candidate.last_use >= entry[0]
                assert candidate.num_pages == kind[0] and candidate.reload_s >= kind[1]
        assert sum(map(len, self._kinds.values())) == len(self._entries)
        assert self.num_pages == sum(kind[0] for kind, _ in self._entries.values())


def _kind(candidate: EvictionCandidate[T]) -> _Kind:
    return candidate.num_pages, candidate.reload_s
