"""Proposes the drafts of one sequence: forced text, few choices, and earlier text.

Earlier text is in its prompt or answer, or, if it asked for that, in the tenant's earlier answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.drafts.answers import AnswerMemory
from engine.drafts.heads import HEADS, HeadState
from engine.drafts.lookup import Copying, LookupIndex
from engine.drafts.profile import Kind, Place, Profile, Source
from engine.sampling.grammar import Matcher
from engine.sampling.walk import Walk
from engine.sequence import Sequence

FORCED, CHOICE = Kind(Source.FORCED), Kind(Source.CHOICE)
_LOOKUPS = tuple(Kind(Source.LOOKUP, agreeing) for agreeing in range(4))
_MEMORIES = tuple(Kind(Source.MEMORY, agreeing) for agreeing in range(4))


@dataclass(frozen=True, slots=True)
class Known:
    """The drafting state of a sequence while it runs: `Sequence.drafting`."""

    profile: Profile
    index: LookupIndex = field(default_factory=LookupIndex)
    memory: AnswerMemory | None = None
    heads: HeadState = field(default_factory=HeadState)


@dataclass(slots=True)
class Proposal:
    """The drafts of one sequence in one step.

    first   its place in the sequence
    kinds   of each draft
    places  of each draft, and of the token behind the last one, as far as it was looked at; None:
            the grammar allows many tokens there
    is_ahead  whether it follows a token in flight
    guess     what that token was taken for, where the grammar allows few; None: it is certain
    guess_at  the place of that token, if the grammar allows few
    num_drafts  how many of its tokens became drafts; set when they do
    """

    profile: Profile
    first: int
    tokens: list[int] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    places: list[Place | None] = field(default_factory=list)
    is_ahead: bool = False
    guess: int | None = None
    guess_at: Place | None = None
    num_drafts: int = 0

    @property
    def num_sure(self) -> int:
        """Return the number of its first drafts that are forced."""
        others = (i for i, kind in enumerate(self.kinds) if kind is not FORCED)
        return next(others, len(self.kinds))

    def keep(self, count: int) -> None:
        """Keep the first drafts only."""
        if count < len(self.tokens):
            del self.tokens[count:], self.kinds[count:], self.places[count:]

    def learn(self, found: list[int]) -> None:
        """Note the tokens that were chosen where the drafts are, and the one behind them."""
        for token_id, place in zip(found, self.places, strict=False):
            if place is not None:
                self.profile.note_choice(place, token_id)
        for token_id, draft, kind in zip(found, self.tokens, self.kinds, strict=False):
            if kind is not FORCED:  # these are always right
                self.profile.note(kind, token_id == draft)
            if token_id != draft:
                break


def propose(
    sequence: Sequence,
    matcher: Matcher | None,
    most: int,
    least_chance: Callable[[int], float],
) -> Proposal:
    """Draft up to `most` tokens of a sequence that has its `Known`.

    least_chance  number of the sequence's drafts -> the chance at which one more pays
    """
    known: Known = sequence.drafting
    known.index.update(sequence.token_ids)
    own = _Drafting(sequence, matcher, most, least_chance)
    while own.add_forced() or own.add_choice() or own.add_remembered() or own.add_likelier():
        pass
    return own.proposal


class _Drafting:
    """One proposal in the making."""

    def __init__(
        self,
        sequence: Sequence,
        matcher: Matcher | None,
        most: int,
        least_chance: Callable[[int], float],
    ) -> None:
        known: Known = sequence.drafting
        self.proposal = Proposal(known.profile, sequence.num_tokens)
        self._sequence, self._most, self._least_chance = sequence, most, least_chance
        self._walk: Walk | None = None if matcher is None else matcher.walk()
        self._copying = Copying(known.index, sequence.token_ids)
        self._recalling: Copying | None = None
        if (memory := known.memory) is not None:
            self._recalling = Copying(memory.index, memory.token_ids, sequence.token_ids)
        self._heads = known.heads
        self._chance = 1.0

    def add_forced(self) -> bool:
        """Add the tokens of the text that the grammar forces."""
        if self._walk is None or len(self.proposal.places) > len(self.proposal.tokens):
            return False
        count = len(self.proposal.tokens)
        if count < self._most:
            for token_id in self._walk.forced():
                if not self._add(token_id, FORCED):
                    break
        return len(self.proposal.tokens) > count

    def add_choice(self) -> bool:
        """Add the token that was last chosen where the grammar allows few."""
        if self._walk is None or len(self.proposal.places) > len(self.proposal.tokens):
            return False
        if len(self.proposal.tokens) >= self._most:
            return False
        few = self._walk.few_allowed()
        place = None if few is None else (self._last, few)
        chosen = None if place is None else self.proposal.profile.choice(place)
        if chosen is not None and self._add(chosen[0], CHOICE, place, rate=chosen[1]):
            return True
        self.proposal.places.append(place)
        return False

    def add_likelier(self) -> bool:
        """Add what lookup or the adapter's heads guess: the one that was right more often first."""
        rate, place = self.proposal.profile.rate, len(self.proposal.tokens)
        if place >= len(self._heads.guesses):
            return self._add_copied()
        found = self._copying.next(self.proposal.tokens)
        if found is not None and rate(_LOOKUPS[found[1]]) > rate(HEADS[place]):
            return self._add_copied() or self._add_headed(place)
        return self._add_headed(place) or self._add_copied()

    def _add_headed(self, place: int) -> bool:
        """Add the token that the adapter's head guesses for this place."""
        is_probe = self._heads.is_probe and place == 0
        return self._add_guess(self._heads.guesses[place], HEADS[place], is_probe=is_probe)

    def _add_copied(self) -> bool:
        """Add the token that followed when the last ones stood there before."""
        return self._add_from(self._copying, _LOOKUPS)

    def add_remembered(self) -> bool:
        """Add the token that followed the last two or more in an earlier answer."""
        return self._recalling is not None and self._add_from(self._recalling, _MEMORIES, 2)

    def _add_from(self, copying: Copying, kinds: tuple[Kind, ...], least: int = 1) -> bool:
        """Add the token at a place that was found, if at least `least` tokens before it agree."""
        found = copying.next(self.proposal.tokens)
        if found is None or found[1] < least:
            return False
        return self._add_guess(found[0], kinds[found[1]])

    def _add_guess(self, token_id: int, kind: Kind, *, is_probe: bool = False) -> bool:
        """Add a token that stands for what the grammar was found to allow there, if any."""
        place = None
        if len(self.proposal.places) > len(self.proposal.tokens):
            place = self.proposal.places.pop()
        is_added = self._add(token_id, kind, place, is_probe=is_probe)
        if not is_added:
            self.proposal.places.append(place)
        return is_added

    @property
    def _last(self) -> int:
        return (self.proposal.tokens or self._sequence.token_ids)[-1]

    def _add(
        self,
        token_id: int,
        kind: Kind,
        place: Place | None = None,
        *,
        is_probe: bool = False,
        rate: float | None = None,
    ) -> bool:
        """Add a draft if it is legal and pays.

        rate  how often it is right; None: as others of its kind
        """
        proposal = self.proposal
        count = len(proposal.tokens)
        if count >= self._most or token_id in self._sequence.stop_ids:
            return False
        chance = self._chance * (proposal.profile.rate(kind) if rate is None else rate)
        pays = is_probe or chance >= self._least_chance(count)
        if not pays and not proposal.profile.probes(kind):
            return False
        if self._walk is not None and not self._walk.accept(token_id):
            return False
        self._chance = chance
        proposal.tokens.append(token_id)
        proposal.kinds.append(kind)
        proposal.places.append(place)
        self._copying.note(token_id)
        if self._recalling is not None:
            self._recalling.note(token_id)
        return True
