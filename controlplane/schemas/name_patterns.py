"""Decide whether patterns of property names overlap, and which listed names they use up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence, Set

from contract.schemas.ecma_regex import Characters, Choice, Node, Repeat
from contract.schemas.patterns import texts_of, whole_nodes

#: Work for one schema: two places cost 100, a comparison of two classes their ranges.
MAX_WORK = 200_000
#: Most patterns of a schema that are read, and most names of one that is listed.
MAX_PATTERNS, MAX_NAMES = 64, 128

#: The rest of a pattern that is still to match.
_Rest = tuple[Node, ...]
_Ranges = tuple[tuple[int, int], ...]


class NamePatterns:
    """A comparison of the patterns of one schema, in bounded time.

    listed  the names of all properties that the schema lists
    """

    def __init__(self, listed: Set[str] = frozenset()) -> None:
        self._listed = listed
        self._left = MAX_WORK
        self._overlaps: dict[tuple[str, ...], tuple[str, str] | None] = {}
        self._names: dict[str, list[str] | None] = {}

    def lists(self, names: Iterable[str]) -> bool:
        """Return whether the schema lists all these names as properties."""
        return self._listed >= set(names)

    def used_up(self, pattern: str) -> list[str] | None:
        """Return the names of a pattern if the schema lists all of them, else None."""
        if pattern not in self._names:
            names = texts_of(pattern, min(MAX_NAMES, len(self._listed)))
            is_used_up = names is not None and self.lists(names)
            self._names[pattern] = names if is_used_up else None
        return self._names[pattern]

    def are_too_many(self, patterns: Sequence[str]) -> bool:
        """Count these patterns; return whether they are too many with the earlier ones."""
        return len(self._names.keys() | set(patterns)) > MAX_PATTERNS

    def overlapping(self, patterns: Sequence[str]) -> tuple[str, str] | None:
        """Return two patterns that may match the same name; None: there are none, for certain."""
        key = tuple(patterns)
        if key not in self._overlaps:
            pairs = itertools.combinations(patterns, 2)
            found = (pair for pair in pairs if self._may_overlap(*pair))
            self._overlaps[key] = next(found, None)
        return self._overlaps[key]

    def _may_overlap(self, one: str, other: str) -> bool:
        pairs = list(itertools.product(whole_nodes(one), whole_nodes(other)))
        seen = set(pairs)
        while pairs:
            self._left -= 100
            (mine, ends), (its, also_ends) = map(_steps, pairs.pop())
            if ends and also_ends:
                return True
            for (ranges, rest), (others, its_rest) in itertools.product(mine, its):
                self._left -= len(ranges) + len(others)
                if self._left < 0:
                    return True
                pair = rest, its_rest
                if pair not in seen and _meet(ranges, others):
                    seen.add(pair)
                    pairs.append(pair)
        return False


def _steps(start: _Rest) -> tuple[list[tuple[_Ranges, _Rest]], bool]:
    """Return the characters that may follow, each with its rest, and whether the end may follow."""
    found: list[tuple[_Ranges, _Rest]] = []
    todo, seen, may_end = [start], {start}, False
    while todo:
        nodes = todo.pop()
        if not nodes:
            may_end = True
            continue
        more: list[_Rest] = []
        match nodes[0]:
            case Characters(ranges):
                found.append((ranges, nodes[1:]))
            case Choice(branches):
                more = [branch + nodes[1:] for branch in branches]
            case Repeat(node, low, high):
                if low == 0:
                    more.append(nodes[1:])
                if high != 0:
                    again = Repeat(node, max(low - 1, 0), None if high is None else high - 1)
                    more.append((node, again, *nodes[1:]))
        todo += [rest for rest in more if rest not in seen]
        seen.update(more)
    return found, may_end


def _meet(one: _Ranges, other: _Ranges) -> bool:
    """Return whether two sorted lists of ranges have a code point in common."""
    mine, its = iter(one), iter(other)
    a, b = next(mine, None), next(its, None)
    while a is not None and b is not None:
        if a[0] <= b[1] and b[0] <= a[1]:
            return True
        if a[1] < b[1]:
            a = next(mine, None)
        else:
            b = next(its, None)
    return False
