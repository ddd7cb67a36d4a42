"""Verification: the tokens of a step with drafts, chosen one position after the other.

A pass over a sequence's last token and its k drafts gives the logits behind each of them. The token
behind the last one is chosen as always. If it equals the first draft, then the logits behind that
draft are those that the next step would compute, and the next token is chosen from them, and so on:
each token by the same sampler from the same logits, with its own penalties, mask and noise. So
drafts change how many steps an answer takes, and nothing else.

A draft that is the only token that its grammar allows (`Row.certain`) is taken without logits:
whatever they are, the mask leaves that token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.execution.draft_heads import States
from engine.sampling.logits import LogitsProcessor
from engine.sampling.sampler import Sampled
from engine.sequence import Row, Sequence

_LATER = Sampled(-1, None)  # stands for a token that is not chosen yet
#: (rows of the logits, their sequences) -> the tokens chosen from them
Choose = Callable[[list[int], list[Sequence]], list[Sampled]]


@dataclass(slots=True)
class _Place:
    """The state of one row's verification.

    depth  number of drafts that were right
    first  row of the logits behind the sequence's last token
    last   row of the logits that the newest token was chosen from
    next   row of the logits that the next token is chosen from, unless that is certain
    """

    row: Row
    first: int
    next: int
    depth: int = 0
    last: int = 0

    def advance(self, token: Sampled) -> bool:
        """Note the token that was chosen; return whether it is the one drafted."""
        row, depth = self.row, self.depth
        is_over = depth >= len(row.drafts) or row.sequence.has_ended or token.error is not None
        if is_over or token.token_id != row.drafts[depth]:
            return False
        accepted, source = row.sequence.accepted, row.sources[depth]
        accepted[source] = accepted.get(source, 0) + 1
        self.depth += 1
        return True


def on_host(logits: torch.Tensor, processor: LogitsProcessor) -> Choose:
    """Choose from logits [N, V] once the tokens before are known, as without drafts."""
    return lambda rows, sequences: processor.choose_live(logits[rows], sequences)


def on_device(read: Callable[[], list[Sampled]]) -> Choose:
    """Take the tokens that the device has chosen for all rows at once.

    Those behind a wrong draft are never asked for. Each of the others has the mask and the noise of
    its place, which the drafts before it tell.
    """
    tokens: list[Sampled] = []

    def choose(rows: list[int], sequences: list[Sequence]) -> list[Sampled]:
        if not tokens:
            tokens.extend(read())
        return [tokens[row] for row in rows]

    return choose


class Verification:
    """Chooses the tokens of one step.

    rows    of the step that sample; some have drafts
    choose  returns the next tokens of sequences, from these rows of `Batch.sample_rows`
    states  what the LM head read for these rows, if that is kept
    """

    def __init__(
        self,
        rows: list[Row],
        choose: Choose,
        processor: LogitsProcessor,
        states: States | None = None,
    ) -> None:
        self._choose_from, self._processor, self._states = choose, processor, states
        self._places: list[_Place] = []
        self._right: list[_Place] = []  # whose newest token is the one drafted
        count = 0
        for row in rows:
            self._places.append(_Place(row, count, count))
            count += row.num_wanted if row.drafts else 1

    def read(self) -> list[Sampled]:
        """Return the token behind the last token of each sequence that samples."""
        return self._choose(self._places)

    def go_on(
        self, commit: Callable[[Row], None] | None
    ) -> Iterator[tuple[list[Sequence], list[Sampled]]]:
        """Yield sequences whose newest token is the one drafted, each with its next token.

        The caller appends the tokens to the sequences before it asks for more.

        commit  is called for each right draft whose sequence continues: its KV is in the pages.
                None: all rows have been committed
        """
        while True:
            going = [place for place in self._right if not place.row.sequence.has_ended]
            if not going:
                return
            sequences = [place.row.sequence for place in going]
            if commit is not None:
                for sequence in sequences:
                    commit(Row(sequence, 1))
            yield sequences, self._choose(going)

    def newest(self) -> list[int]:
        """Return the row of the logits behind each sequence's last draft."""
        return [
            place.first + (place.row.num_wanted - 1 if place.row.drafts else 0)
            for place in self._places
        ]

    def wrong_rows(self) -> list[Row]:
        """Return the rows with a wrong draft, once all tokens are chosen."""
        return [place.row for place in self._places if place.depth < len(place.row.drafts)]

    def last_states(self) -> Iterator[tuple[Sequence, torch.Tensor]]:
        """Yield each sequence with a copy of what the LM head read [E] for its newest token."""
        if self._states is not None and self._states.x is not None:
            for place in self._places:
                yield place.row.sequence, self._states.x[place.last].clone()

    def _choose(self, places: list[_Place]) -> list[Sampled]:
        """Return the next token of each place; find those that are right."""
        sampled: list[Sampled] = []
        rows: list[int] = []
        own: list[Sequence] = []
        for place in places:
            row, depth = place.row, place.depth
            if depth < len(row.certain) and row.certain[depth]:
                sampled.append(self._processor.take(row.sequence, row.drafts[depth]))
            else:
                sampled.append(_LATER)
                rows.append(place.next)
                own.append(row.sequence)
                place.last = place.next
                place.next += 1
        if rows:
            found = self._choose_from(rows, own)
            if len(found) < len(sampled):
                left = iter(found)
                found = [next(left) if token is _LATER else token for token in sampled]
            sampled = found
        self._right = [
            place
            for place, token in zip(places, sampled, strict=True)
            if place.row.drafts and place.advance(token)
        ]
        return sampled
