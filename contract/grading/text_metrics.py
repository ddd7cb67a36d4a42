"""Similarities of two texts, from 0 to 1, by the names of OpenAI's text_similarity grader. Pure.

    fuzzy_match   2 * longest common subsequence of characters / all characters
    bleu          of 1 to 4 words, with one added to what is counted of several (Lin and Och, 2004)
    gleu          the lesser of precision and recall of 1 to 4 words (arXiv:1609.08144)
    rouge_n       F1 of n words, n from 1 to 5
    rouge_l       F1 of the longest common subsequence of words

Case does not count in rouge's and gleu's words; it does in the others.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

#: Characters of a text that are compared; the rest is left out.
MAX_CHARS = 20_000
_WORD = re.compile(r"\w+|[^\w\s]")
_LONGEST = 4


def similarity(metric: str, text: str, reference: str) -> float:
    """Return how alike two texts are by a metric of `METRICS`."""
    return METRICS[metric](text[:MAX_CHARS], reference[:MAX_CHARS])


def _fuzzy(text: str, reference: str) -> float:
    return _of_both(common_length(text, reference), len(text), len(reference))


def _of_both(common: int, one: int, other: int) -> float:
    return 1.0 if not one + other else 2 * common / (one + other)


def common_length(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence, by bits of integers (Hyyro, 2004)."""
    places: dict[Hashable, int] = {}
    for at, each in enumerate(one):
        places[each] = places.get(each, 0) | 1 << at
    mask = (1 << len(one)) - 1
    free = mask
    for each in other:
        matched = free & places.get(each, 0)
        free = ((free + matched) | (free - matched)) & mask
    return len(one) - free.bit_count()


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _grams(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + size]) for i in range(len(words) - size + 1))


def _bleu(text: str, reference: str) -> float:
    words, wanted = _words(text), _words(reference)
    if not words or not wanted:
        return float(words == wanted)
    logs = 0.0
    for size in range(1, _LONGEST + 1):
        added = size > 1
        grams = _grams(words, size)
        common = (grams & _grams(wanted, size)).total() + added
        if not common:
            return 0.0
        logs += math.log(common / (grams.total() + added)) / _LONGEST
    brevity = min(0.0, 1 - len(wanted) / len(words))
    return min(1.0, math.exp(logs + brevity))


def _gleu(text: str, reference: str) -> float:
    words, wanted = (_words(each.casefold()) for each in (text, reference))
    common = own = others = 0
    for size in range(1, _LONGEST + 1):
        grams, references = _grams(words, size), _grams(wanted, size)
        common += (grams & references).total()
        own, others = own + grams.total(), others + references.total()
    return float(words == wanted) if not max(own, others) else common / max(own, others)


def _rouge(size: int) -> Callable[[str, str], float]:
    def measure(text: str, reference: str) -> float:
        words, wanted = (_words(each.casefold()) for each in (text, reference))
        one, other = _grams(words, size), _grams(wanted, size)
        if not one and not other:  # too short to compare
            return float(words == wanted)
        return _of_both((one & other).total(), one.total(), other.total())

    return measure


def _rouge_l(text: str, reference: str) -> float:
    one, other = (_words(each.casefold()) for each in (text, reference))
    return _of_both(common_length(one, other), len(one), len(other))


METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": _fuzzy,
    "bleu": _bleu,
    "gleu": _gleu,
    **{f"rouge_{size}": _rouge(size) for size in range(1, 6)},
    "rouge_l": _rouge_l,
}
