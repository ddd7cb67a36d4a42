"""Signs that a training learned to please its measure: how both versions answer. Pure.

Scores can rise while answers get longer, repeat themselves, refuse, or break their schema. The
answers that the gate compares are measured; what grew by more than the limits holds the version.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from controlplane.evaluations.checks import obeys

#: Words of each passage that is looked for a second time in an answer.
_NGRAM = 4
#: Characters in which a refusal is looked for, from the answer's beginning.
_REFUSAL_CHARS = 200
#: Characters by which the mean answer has to grow, too, before its ratio counts.
MIN_GROWTH = 50
_REFUSAL = re.compile(
    r"\b(?:i(?: am|'m) (?:sorry|unable|not able)|i (?:can ?not|can't|won't|will not)\b"
    r"|as an ai\b|es tut mir leid|ich kann (?:das |dir |ihnen )?(?:leider )?nicht)",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest growth that passes.

    max_length_ratio  of the mean answer's characters
    max_repeated_rise, max_refusals_rise, max_invalid_rise  of the shares; 1: no limit
    """

    max_length_ratio: float = 2.0
    max_repeated_rise: float = 0.2
    max_refusals_rise: float = 0.2
    max_invalid_rise: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Means over the answers of one version.

    length    characters
    refusals  the share of answers that begin with a refusal, in English or German
    repeated  the share of four-word passages that the answer has before
    invalid   the share of answers that break their case's schema; None: no case has one
    """

    length: float
    refusals: float
    repeated: float
    invalid: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            name: None if value is None else round(value, 4)
            for name, value in dataclasses.asdict(self).items()
        }


def habits_of(answers: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> Habits:
    """Return the habits of at least one answer, each with its case's checks."""
    texts = [text for text, _ in answers]
    valid = [
        all(obeys(text, schema) for schema in schemas)
        for text, checks in answers
        if (schemas := [each["schema"] for each in checks if each["type"] == "json_schema"])
    ]
    return Habits(
        length=sum(map(len, texts)) / len(texts),
        refusals=sum(map(is_refusal, texts)) / len(texts),
        repeated=sum(map(repeated_share, texts)) / len(texts),
        invalid=valid.count(False) / len(valid) if valid else None,
    )


def is_refusal(text: str) -> bool:
    """Return whether an answer begins with a refusal."""
    return _REFUSAL.search(text[:_REFUSAL_CHARS].replace("\u2019", "'")) is not None


def repeated_share(text: str) -> float:
    """Return the share of an answer's four-word passages that stood in it before; 0 if short."""
    words = text.casefold().split()
    passages = [tuple(words[i : i + _NGRAM]) for i in range(len(words) - _NGRAM + 1)]
    return 1 - len(set(passages)) / len(passages) if passages else 0.0


def alarms(before: Habits, after: Habits, limits: Limits) -> list[str]:
    """Return a sentence for each habit that grew by more than its limit."""
    found = []
    grown = after.length - before.length
    if grown > MIN_GROWTH and after.length > limits.max_length_ratio * before.length:
        found.append(
            f"Answers grew from {before.length:.0f} to {after.length:.0f} characters; the limit "
            f"is {limits.max_length_ratio:g} times as long."
        )
    for name, called in (
        ("repeated", "Repeated text"),
        ("refusals", "Refusals"),
        ("invalid", "Answers that break their schema"),
    ):
        old, new = getattr(before, name), getattr(after, name)
        limit = getattr(limits, f"max_{name}_rise")
        if old is not None and new is not None and new - old > limit + 1e-9:
            found.append(
                f"{called} grew from {old:.0%} to {new:.0%}; the limit is {limit * 100:g} points."
            )
    return found
