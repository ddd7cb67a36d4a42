"""Speculation: decides which rows of a step bring drafts, and learns from the outcome.

Drafts are in nobody's way: they get what the step's rows leave of its tokens, and pages that are
free. A draft pays if it is right more often than its row would have given tokens elsewhere
(`StepCosts`).

On a GPU a step is launched ahead, before the tokens of the one in flight are read. Where the
grammar forces a text behind the tokens that are known, its first token is the one in flight,
whatever the logits are, and the others are drafts of the step that is launched: nothing waits for
them. Where the grammar allows a few tokens, the one in flight is taken for the one that was chosen
last, and so on behind it. A further step may be launched before it is known which of these are
right; what it computes for a sequence with a wrong one counts for nothing. Other drafts follow from
tokens that the host must know; it waits for these only where such drafts were right often enough
lately.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.drafts.ahead import MAX_DRAFTS, Candidate, propose_ahead
from engine.drafts.answers import AnswerMemories
from engine.drafts.costs import CPU, GPU, StepTimes
from engine.drafts.heads import HeadDrafts
from engine.drafts.profile import NAMES, Place, Profile, Profiles, Source
from engine.drafts.proposer import CHOICE, FORCED, Known, Proposal, propose
from engine.execution.in_flight import InFlightStep
from engine.sampling.grammar import Grammars
from engine.scheduling.page_tables import PageTables
from engine.sequence import Row, Sequence, Step
from engine.stats import DraftCounts

#: Largest share of all steps that may be spent on waiting for steps that do not seem worth it.
_TRYING = 0.003


@dataclass(frozen=True, slots=True)
class _Choice:
    """A token in flight where the grammar allows few.

    index  its place in the sequence
    guess  what it was taken for; None: for nothing
    """

    sequence: Sequence
    profile: Profile
    index: int
    place: Place
    guess: int | None = None

    def learn(self) -> bool:
        """Note what was chosen; return whether there is nothing more to note."""
        token_ids = self.sequence.token_ids
        if self.index >= len(token_ids) or token_ids[self.index] < 0:
            return self.sequence.has_ended
        chosen = token_ids[self.index]
        self.profile.note_choice(self.place, chosen)
        if self.guess is not None:
            self.profile.note(CHOICE, chosen == self.guess)
        return True


class Speculation:
    """Adds drafts to steps; learns from their outcome.

    context_limit  tokens that a sequence may have
    heads          those of adapters
    step_times     of a GPU's steps by their rows; empty: not measured
    """

    def __init__(
        self,
        config: EngineConfig,
        tables: PageTables,
        grammars: Grammars,
        context_limit: int,
        heads: HeadDrafts,
        step_times: StepTimes = (),
    ) -> None:
        self._heads = heads
        self._tables, self._grammars, self._context_limit = tables, grammars, context_limit
        self._is_on = config.speculation
        self.costs = CPU
        if config.runs_triton:
            own = GPU.measured(step_times)
            self.costs = replace(own, max_rows=config.max_drafted_rows or 0)
        self._num_unwaited = 0
        self._profiles, self._answers = Profiles(), AnswerMemories()
        self._remembered: dict[Sequence, None] = {}  # those that run
        self._unlearned: list[tuple[Row, Proposal]] = []
        # Drafts behind tokens in flight, for the step that is planned.
        self._ahead: dict[Sequence, Proposal] = {}
        self._choices: list[_Choice] = []  # that are not known yet
        self._counts = {source: DraftCounts() for source in Source}

    def waits(self, step: Step) -> bool:
        """Return whether the tokens of a step in flight are read before the next one is planned."""
        if not self._is_on or len(step.rows) > self.costs.max_requests:
            return False
        own = [s for s in step.sampling if s.request.speculation and not s.has_left]
        has_prompts = len(step.sampling) < len(step.rows)
        if not own or (has_prompts and self.costs.only_decodes):
            return False
        gains = [1.0 if s.drafting is None else s.drafting.profile.gain for s in own]
        followed = [s for s in own if self._grammars.matcher(s) is not None]
        costs = self.costs
        cost = costs.waiting + costs.waiting_each * len(own) + costs.following * len(followed)
        self._num_unwaited += 1
        if sum(gains) >= cost * len(step.rows) or self._num_unwaited * _TRYING >= cost:
            self._num_unwaited = 0
            return True
        return False

    def look_ahead(self, launched: InFlightStep) -> bool:
        """Find what is forced, or chosen among few, behind the tokens of a step in flight.

        Its placeholders stand in the sequences. Where that step has drafts of a sequence nothing is
        looked for. Returns whether there are drafts.
        """
        self._ahead = {}
        if not self._is_on:
            return False
        in_flight = launched.step
        skipped = {row.sequence for row in in_flight.rows if row.drafts} | launched.void
        candidates = []
        for sequence in in_flight.sampling:
            if sequence.has_left or sequence in skipped or not sequence.request.speculation:
                continue
            matcher = self._grammars.matcher(sequence)
            if matcher is None or (few := matcher.few) is None:
                continue
            if (most := self._most_useful(sequence)) > 0:
                profile = (sequence.drafting or self._known(sequence)).profile
                candidates.append(Candidate(sequence, matcher, few, profile, most))
        num_sampling = len(in_flight.sampling)
        row = self.costs.least_chance(num_sampling, num_sampling, 0)
        for sequence, proposal in propose_ahead(candidates, self._grammars.compute_masks, row):
            if proposal.guess_at is not None:
                place = sequence.num_tokens - 1, proposal.guess_at, proposal.guess
                self._choices.append(_Choice(sequence, proposal.profile, *place))
            if proposal.tokens:
                self._ahead[sequence] = proposal
            elif proposal.guess is None and proposal.places and proposal.places[0] is not None:
                place = sequence.num_tokens, proposal.places[0], None
                self._choices.append(_Choice(sequence, proposal.profile, *place))
        return bool(self._ahead)

    def propose(self, step: Step, *, is_ahead: bool = False) -> None:
        """Add drafts to the rows that sample.

        is_ahead  the step before is in flight: its tokens are not known, and drafts are only what
                  `look_ahead` has found
        """
        if not self._is_on or step.new_pages is not None:
            return
        sampling = [row for row in step.rows if row.samples]
        for row in sampling:
            if row.sequence.request.remember:
                self._remembered[row.sequence] = None
        if self.costs.only_decodes and not step.num_tokens == len(step.rows) == len(sampling):
            return
        drafting = [row for row in sampling if row.sequence.request.speculation]
        if is_ahead:
            self._propose_ahead(step, drafting)
        elif len(sampling) <= self.costs.max_requests:
            self._propose_known(step, drafting, sampling)

    def _propose_ahead(self, step: Step, drafting: list[Row]) -> None:
        """Add what was found behind tokens that are in flight."""
        num_rows = step.num_tokens
        for row in drafting:
            proposal = self._ahead.get(row.sequence)
            if proposal is not None:
                proposal.keep(max(0, min(step.budget, self.costs.max_rows - num_rows)))
                if proposal.tokens:
                    num_rows += self._add(step, row, proposal)

    def _propose_known(self, step: Step, drafting: list[Row], sampling: list[Row]) -> None:
        """Add what all sources propose behind tokens that are known."""
        num_rows = step.num_tokens
        self._ask_heads(step, drafting, len(sampling))
        for row in drafting:
            sequence = row.sequence
            room = min(step.budget, self.costs.max_rows - num_rows)
            most = min(MAX_DRAFTS, room, self._most_useful(sequence))
            if most < 1:
                continue
            proposal = propose(
                sequence,
                self._grammars.matcher(sequence),
                most,
                functools.partial(self.costs.least_chance, len(sampling), num_rows),
            )
            num_rows += self._add(step, row, proposal)

    def _add(self, step: Step, row: Row, proposal: Proposal) -> int:
        """Add a proposal to its row, as far as there are pages for it; return how many drafts."""
        step.proposals.append((row, proposal))
        num = self._tables.reserve_drafts(row, len(proposal.tokens)) if proposal.tokens else 0
        row.drafts = tuple(proposal.tokens[:num])
        kinds = proposal.kinds[:num]
        row.sources = tuple([NAMES[kind.source] for kind in kinds])
        if row.sequence.request.sampling.logprobs is not None:
            certain = [False] * num
        else:
            certain = [kind is FORCED for kind in kinds]
        if proposal.guess is not None:
            certain[:1] = [False] * min(num, 1)  # if the guess is wrong, these logits are needed
        row.certain = tuple(certain)
        row.is_ahead = proposal.is_ahead
        row.num_sure = min(proposal.num_sure, num)
        proposal.num_drafts = num
        row.num_tokens += num
        step.budget -= num
        step.has_drafts = step.has_drafts or num > 0
        row.sequence.num_drafted += num
        return num

    def _known(self, sequence: Sequence) -> Known:
        """Return what is kept of the sequence while it runs."""
        if sequence.drafting is None:
            memory = self._answers.of(sequence)
            sequence.drafting = Known(self._profiles.of(sequence), memory=memory)
        known: Known = sequence.drafting
        return known

    def _ask_heads(self, step: Step, drafting: list[Row], num_sampling: int) -> None:
        """Get the guesses of the adapters' heads; see that what they read next is kept."""
        asked = []
        for row in drafting:
            sequence = row.sequence
            known = self._known(sequence)
            if num_sampling <= self.costs.max_asked and self._heads.of(sequence):
                step.keeps_states = True
                most = min(step.budget, self._most_useful(sequence))
                asked.append((sequence, known.profile, known.heads, most))
        least_chance = functools.partial(self.costs.least_chance, num_sampling, step.num_tokens)
        self._heads.guess(asked, num_sampling, least_chance, self.costs.asking)

    def cut(self, step: Step) -> None:
        """Cut drafts behind wrong guesses, once the tokens that were in flight are known."""
        for row, proposal in step.proposals:
            sequence, guess = row.sequence, proposal.guess
            if guess is None or not row.drafts or sequence.token_ids[-1] == guess:
                continue
            row.cut(0)
            if sequence.is_running:
                self._tables.trim(sequence)

    def settle(
        self,
        launched: InFlightStep,
        dropped: InFlightStep | None = None,
        following: InFlightStep | None = None,
    ) -> None:
        """Give back the pages of wrong drafts, once the step's tokens are known.

        dropped    the step that was launched over a wrong token, if any
        following  the step that was launched over its drafts, if any: it has a void row for each
                   sequence with a wrong draft
        """
        if dropped is not None:
            self.drop(dropped.step)
        for sequence in launched.misled():
            self._tables.rewind(sequence)
            if following is not None:
                following.void.add(sequence)
        for row in () if launched.placed is None else launched.step.rows:
            if row.num_sure < len(row.drafts) and row.sequence.is_running:
                # Drafts now known to be right are offered for sharing, and pages behind them are
                # given back.
                self._tables.commit(Row(row.sequence, 0))
        drafted, was_ahead = launched.drafted, launched.placed is not None
        # If the next step was launched over this one, its states are overwritten.
        states = () if drafted is None or was_ahead else drafted.last_states()
        for sequence, state in states:
            if sequence.is_running and sequence.drafting is not None:
                sequence.drafting.heads.keep(state, sequence.num_tokens)
        for sequence in [s for s in self._remembered if s.has_ended]:
            del self._remembered[sequence]
            known: Known | None = sequence.drafting
            if known is not None and known.memory is not None:
                known.memory.add(sequence.token_ids[sequence.num_prompt :])
        proposals, launched.step.proposals = launched.step.proposals, []
        for row, proposal in proposals:
            sequence = row.sequence
            # If the step's drafts are certain, the next step may already have taken pages.
            if proposal.tokens and sequence.is_running and not was_ahead:
                self._tables.trim(sequence)
        self._unlearned += proposals

    def learn(self) -> None:
        """Learn from the steps that were settled: while the next one runs, if nothing stops it."""
        proposals, self._unlearned = self._unlearned, []
        for row, proposal in proposals:
            token_ids = row.sequence.token_ids
            found = token_ids[proposal.first :]
            guess = proposal.guess
            is_right = guess is None or token_ids[proposal.first - 1 : proposal.first] == [guess]
            if is_right:
                proposal.learn(found)
            num_right = 0
            for kind, draft in zip(
                proposal.kinds[: proposal.num_drafts], proposal.tokens, strict=False
            ):
                is_right = is_right and num_right < len(found) and found[num_right] == draft
                self._counts[kind.source].add(is_accepted=is_right)
                num_right += is_right
            if not proposal.is_ahead:
                # Forced text and choices need no waiting: without it they only take one step more.
                unwaited = sum(kind in (FORCED, CHOICE) for kind in proposal.kinds[:num_right])
                proposal.profile.note_gain(num_right - max(0, unwaited - 1))
        if self._choices:
            self._choices = [choice for choice in self._choices if not choice.learn()]

    def drop(self, step: Step) -> None:
        """Undo what was done for a step that was launched over a wrong token."""
        for row, proposal in step.proposals:
            row.sequence.num_drafted -= proposal.num_drafts
            if row.sequence.is_running:
                self._tables.trim(row.sequence)

    def read_counts(self) -> dict[str, DraftCounts]:
        """Return the drafts so far by source; nothing if it is off."""
        if not self._is_on:
            return {}
        return {str(source): replace(counts) for source, counts in self._counts.items()}

    def forget_adapter(self, digest: str) -> None:
        """Drop what was learned of an adapter's answers."""
        self._profiles.forget_adapter(digest)
        self._answers.forget_adapter(digest)

    def forget_answers(self, tenant_id: str) -> None:
        """Drop what a tenant's requests with `Request.remember` left."""
        self._answers.forget_tenant(tenant_id)

    def _most_useful(self, sequence: Sequence) -> int:
        """Return how many drafts could be of use before the sequence's limits."""
        room = self._context_limit - sequence.num_tokens
        most = sequence.request.sampling.max_tokens
        if most is not None:
            room = min(room, most - sequence.num_generated)
        return room - 1  # the token behind the last draft is chosen as well
