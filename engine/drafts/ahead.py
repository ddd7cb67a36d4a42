"""Drafts behind tokens in flight: what their grammars force there, and the choices among few.

On a GPU a step is launched before the tokens of the one before are known. Where the grammar allows
one token, the one in flight is known all the same. Where it allows a few, it is taken for the one
that was chosen there last. Behind it stands the text that is forced, then perhaps a choice among
few, and so on.

A wrong guess of the token in flight costs the rows of its drafts: they are not asked. A wrong
choice among the drafts costs its sequence the step behind, which was launched over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.drafts.profile import Place, Profile
from engine.drafts.proposer import CHOICE, FORCED, Proposal
from engine.sampling.grammar import Matcher
from engine.sampling.masks import Masked
from engine.sampling.walk import Walk
from engine.sequence import Sequence

#: Largest number of drafts of one sequence in one step.
MAX_DRAFTS = 16
#: Chance above which a choice among drafts pays: it saves a step if it and all before it are right,
#: and costs one otherwise.
_LEAST_KEPT = 0.5

#: Largest number of rounds in which masks are computed to find further drafts.
_MAX_ROUNDS = 3

#: Computes the masks of several walks together: see `Grammars.compute_masks`.
ComputeMasks = Callable[[Iterable[Sequence], Iterable[Masked]], None]


class Candidate(NamedTuple):
    """A sequence with a token in flight, whose placeholder is its last token.

    few   the tokens that its grammar allows there
    most  tokens that may follow it, before a limit ends the sequence
    """

    sequence: Sequence
    matcher: Matcher
    few: tuple[int, ...]
    profile: Profile
    most: int


def propose_ahead(
    candidates: Iterable[Candidate], compute_masks: ComputeMasks, row_cost: float
) -> list[tuple[Sequence, Proposal]]:
    """Propose drafts of sequences whose grammar allows few tokens where the one in flight is.

    Some proposals have no drafts: what is chosen at their places is wanted for the next time.

    row_cost  of one more row, in tokens that the step would give for that
    """
    paths = list(map(_begin, candidates))
    going = [path for path in paths if path.walk is not None and path.add_first()]
    for _ in range(_MAX_ROUNDS):
        compute_masks((), (path.walk for path in going if path.walk is not None))
        going = [path for path in going if path.add_few()]
    return [(path.sequence, path.finished(row_cost)) for path in paths]


def _begin(candidate: Candidate) -> _Path:
    """Return the place after the token in flight."""
    sequence, few, profile = candidate.sequence, candidate.few, candidate.profile
    proposal = Proposal(profile, sequence.num_tokens, is_ahead=True)
    token_id, chance = few[0], 1.0
    if len(few) > 1:
        proposal.guess_at = sequence.token_ids[-2], few
        chosen = profile.choice(proposal.guess_at)
        if chosen is None:
            return _Path(sequence, proposal, candidate.most)
        token_id, chance = chosen
        proposal.guess = token_id
    walk = None if token_id in sequence.stop_ids else candidate.matcher.walk()
    if walk is not None and not walk.accept(token_id):
        walk = None
    return _Path(sequence, proposal, candidate.most, walk, token_id, chance)


@dataclass(slots=True)
class _Path:
    """One proposal in the making.

    walk    the place behind its drafts; None: it ends before the first
    last    the token before that place
    chance  that the token in flight is what it was taken for
    kept    the chance that all its drafts are right, if that is
    """

    sequence: Sequence
    proposal: Proposal
    most: int
    walk: Walk | None = None
    last: int = -1
    chance: float = 1.0
    kept: float = 1.0
    num_choices: int = 0

    def add_first(self) -> bool:
        """As `add_forced`; looks for nothing where nothing was forced before.

        If there is something all the same, then `add_few` finds it.
        """
        assert self.walk is not None
        place, profile = self.proposal.guess_at, self.proposal.profile
        if place is None:
            return self.add_forced()
        if not profile.expects_forced(place, self.last):
            return self._has_room
        may_go_on = self.add_forced()
        if not self.proposal.tokens:
            profile.note_unforced(place, self.last)
        return may_go_on

    def add_forced(self) -> bool:
        """Add the tokens of the text that is forced; return whether there may be more drafts."""
        assert self.walk is not None
        # The next step is planned as if all drafts were right: not even then may it be the last.
        most = min(MAX_DRAFTS, self.most - (self.num_choices > 0))
        room = most - len(self.proposal.tokens)
        tokens = self.walk.forced()
        stops = self.sequence.stop_ids
        end = next((i for i, token_id in enumerate(tokens) if token_id in stops), len(tokens))
        if added := tokens[: min(end, room)]:
            if not self.walk.accept(*added):
                return False
            self.proposal.tokens += added
            self.proposal.kinds += [FORCED] * len(added)
            self.proposal.places += [None] * len(added)
            self.last = added[-1]
        return self._has_room and len(added) == len(tokens)

    @property
    def _has_room(self) -> bool:
        """Return whether a choice may follow its drafts."""
        return len(self.proposal.tokens) < min(MAX_DRAFTS, self.most - 1)

    def add_few(self) -> bool:
        """Add the token that was chosen last, where few are allowed, or what is forced.

        Returns whether there may be more drafts.
        """
        assert self.walk is not None
        few = self.walk.few_allowed()
        if few is not None and len(few) == 1:
            return self.add_forced()
        place: Place | None = None if few is None else (self.last, few)
        chosen = None if place is None else self.proposal.profile.choice(place)
        if chosen is not None:
            token_id, chance = chosen
            may_stand = token_id not in self.sequence.stop_ids
            if may_stand and self.kept * chance >= _LEAST_KEPT and self.walk.accept(token_id):
                self.proposal.tokens.append(token_id)
                self.proposal.kinds.append(CHOICE)
                self.proposal.places.append(place)
                self.kept *= chance
                self.num_choices += 1
                self.last = token_id
                return self._has_room
        self.proposal.places.append(place)
        return False

    def finished(self, row_cost: float) -> Proposal:
        """Return the proposal, without its drafts if they do not pay.

        A right guess saves its sequence a step, as does each right choice. The forced text is taken
        in any case: if not now, in the next step.
        """
        wrong = (1.0 - self.chance) * len(self.proposal.tokens) * row_cost
        if self.chance * (1.0 + self.num_choices * self.kept) < wrong:
            self.proposal.keep(0)
        return self.proposal
