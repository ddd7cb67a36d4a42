"""Drafts from the heads of an adapter: decides when to ask them, and for which sequences.

The heads read what the LM head read where the sequence's last token was chosen. Only a request of
one adapter with the weight one has drafts of heads: they were trained for that. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.adapters.tiles import HeadMap, TileMap
from engine.drafts.profile import Kind, Profile, Source
from engine.sequence import Sequence

HEADS = tuple(Kind(Source.HEADS, place) for place in range(4))

LeastChance = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Asking:
    """The cost of asking, in rows of a step.

    once  for all sequences: reading the LM head
    each  for each head
    """

    once: float
    each: float


class Guesses(Protocol):
    """`engine.execution.draft_heads.DraftHeads`."""

    def guess(self, asked: SequenceOf[tuple[Any, SequenceOf[HeadMap]]]) -> list[list[int]]:
        """Return for each (state, heads) one token of each head."""


@dataclass(slots=True)
class HeadState:
    """The state that the heads of one sequence read, and their guesses.

    x         [E] of the place where token number `num_tokens` - 1 was chosen; None: not known
    guesses   of this step: token i is the one i places behind the last
    is_probe  whether they are tried although they do not seem to pay
    """

    x: Any = None
    num_tokens: int = 0
    guesses: list[int] = field(default_factory=list)
    is_probe: bool = False

    def keep(self, x: Any, num_tokens: int) -> None:
        """Note a copy of the row of the last chosen token."""
        self.x, self.num_tokens = x, num_tokens


class HeadDrafts:
    """Asks the heads of a step's sequences.

    guesses  None: no heads are used here
    tiles    where a resident adapter lies
    """

    def __init__(self, guesses: Guesses | None, tiles: Callable[[str], TileMap]) -> None:
        self._guesses, self._tiles = guesses, tiles

    def of(self, sequence: Sequence) -> SequenceOf[HeadMap]:
        """Return the heads that may draft for a running sequence."""
        key = sequence.adapter_key
        if self._guesses is None or len(key) != 1 or key[0][1] != 1.0:
            return ()
        return self._tiles(key[0][0]).draft_heads

    def guess(
        self,
        rows: Iterable[tuple[Sequence, Profile, HeadState, int]],
        num_sampling: int,
        least_chance: LeastChance,
        costs: Asking,
    ) -> None:
        """Fill in the guesses of those sequences for which it pays.

        rows  each sequence with its profile, its state, and how many drafts could be of use
        """
        asked = []
        for sequence, profile, state, most in rows:
            state.guesses = []
            if state.x is None or state.num_tokens != sequence.num_tokens:
                continue
            heads = self.of(sequence)[:most]
            if not heads:
                continue
            state.is_probe = False
            if not _pays(profile, len(heads), num_sampling, least_chance, costs):
                state.is_probe = profile.probes(HEADS[0])
                if not state.is_probe:
                    continue
            asked.append((state, heads))
        if asked and self._guesses is not None:
            found = self._guesses.guess([(state.x, heads) for state, heads in asked])
            for (state, _), tokens in zip(asked, found, strict=True):
                state.guesses = tokens


def _pays(
    profile: Profile,
    num_heads: int,
    num_sampling: int,
    least_chance: LeastChance,
    costs: Asking,
) -> bool:
    """Return whether the heads are likely to give more tokens than their cost gives elsewhere."""
    chance, gain, count = 1.0, 0.0, 0
    for kind in HEADS[:num_heads]:
        chance *= profile.rate(kind)
        if chance < least_chance(count):
            break
        gain, count = gain + chance, count + 1
    cost = count + num_heads * costs.each + costs.once / num_sampling
    return count > 0 and gain >= cost * least_chance(0)
