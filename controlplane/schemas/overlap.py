"""Decide whether patterns of names may match the same name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from contract.ecma_regex import Characters, Choice, Node, Repeat
from contract.patterns import whole_nodes

#: Pairs of places in two patterns to look at, for all patterns of an object together.
MAX_PLACES = 2_000

#: What is still to match.
_Rest = tuple[Node, ...]
_Ranges = tuple[tuple[int, int], ...]


def overlapping(patterns: Sequence[str]) -> tuple[str, str] | None:
    """Return two patterns that may match the same name; None: there are none, for certain."""
    left = MAX_PLACES
    starts = [(pattern, whole_nodes(pattern)) for pattern in patterns]
    for (one, first), (other, second) in itertools.combinations(starts, 2):
        pairs = list(itertools.product(first, second))
        seen = set(pairs)
        while pairs:
            left -= 1
            (mine, ends), (its, also_ends) = map(_steps, pairs.pop())
            if left < 0 or (ends and also_ends):
                return one, other
            for (ranges, rest), (others, its_rest) in itertools.product(mine, its):
                pair = rest, its_rest
                if pair not in seen and _meet(ranges, others):
                    seen.add(pair)
                    pairs.append(pair)
    return None


def _steps(start: _Rest) -> tuple[list[tuple[_Ranges, _Rest]], bool]:
    """Return the characters that may follow, with what is then to match, and whether none need."""
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
    """Whether two sorted lists of ranges have a code point in common."""
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
