"""LogitsProcessor: turns a step's logits into one token, or one error, for each sequence.

A failure of one sequence (its adapter's numbers overflow, its grammar's matcher raises) is that
sequence's error alone. The batch is handled as a whole, and row by row only if that raises, to find
the row at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

import torch

from engine.errors import AdapterOverflow, EngineError
from engine.sampling.failures import failed_token
from engine.sampling.grammar import Grammars
from engine.sampling.sampler import Draw, Sampled, Sampler
from engine.sampling.step_masks import DraftMasks, StepMasks
from engine.sequence import Row, Sequence

T = TypeVar("T")


class LogitsProcessor:
    """Applies penalties, biases and grammars to logits, and chooses tokens."""

    def __init__(self, sampler: Sampler, grammars: Grammars) -> None:
        self._sampler, self._grammars = sampler, grammars

    def needs_logits_alone(self, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether a device can choose all next tokens from the logits and `masks` alone."""
        return all(map(self._sampler.is_free, sequences))

    def masks(self, sequences: SequenceOf[Sequence]) -> StepMasks | None:
        """Return what masks the sequences' next tokens; None: none of them has a grammar."""
        if all(self._grammars.matcher(sequence) is None for sequence in sequences):
            return None
        return StepMasks(self._grammars, sequences)

    def draw(self, sequences: SequenceOf[Sequence]) -> Draw | None:
        """See `Sampler.draw`."""
        return self._sampler.draw(sequences)

    def draw_drafted(self, rows: SequenceOf[Row]) -> Draw | None:
        """See `Sampler.draw`; for the wanted tokens of rows that sample, with drafts."""
        places = [(row.sequence, depth) for row in rows for depth in row.wanted]
        return self._sampler.draw([s for s, _ in places], [depth for _, depth in places])

    def draft_masks(self, rows: SequenceOf[Row]) -> DraftMasks | None:
        """As `masks`, for the wanted tokens of rows that sample, with drafts."""
        if all(self._grammars.matcher(row.sequence) is None for row in rows):
            return None
        return DraftMasks(self._grammars, rows)

    def take(self, sequence: Sequence, token_id: int) -> Sampled:
        """Return a token that is certain, without logits, and note it as if it were chosen."""
        if not sequence.has_ended:
            self._sampler.note(sequence, token_id)
        return Sampled(token_id, None)

    def choose_live(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[Sampled]:
        """Call `choose` for the sequences that have not ended; the others get any token."""
        live = [i for i, sequence in enumerate(sequences) if not sequence.has_ended]
        logits = logits if len(live) == len(sequences) else logits[live]
        sampled = dict(zip(live, self.choose(logits, [sequences[i] for i in live]), strict=True))
        return [sampled.get(i, Sampled(0, None)) for i in range(len(sequences))]

    def choose(self, logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[Sampled]:
        """Return one token, or one error, for each row of `logits` [N, V], which may be changed."""
        logits = logits.float()
        wants_logprobs = any(s.request.sampling.logprobs is not None for s in sequences)
        raw = logits.log_softmax(dim=-1) if wants_logprobs else None
        failed: dict[int, Exception] = {}

        def each(action: Callable[[int], T]) -> dict[int, T]:
            """Do `action` for every row that has not failed; note the rows for which it raises."""
            done = {}
            for i in range(len(sequences)):
                if i not in failed:
                    try:
                        done[i] = action(i)
                    except Exception as error:
                        failed[i] = error
            return done

        each(lambda i: self._sampler.adjust(logits, i, sequences[i]))
        try:
            self._grammars.mask(logits, sequences)
        except Exception:
            each(lambda i: self._grammars.mask(logits[i : i + 1], sequences[i : i + 1]))
        try:
            sampled = dict(enumerate(self._sampler.choose(logits, sequences, raw)))
        except Exception:
            own = None if raw is None else raw.unsqueeze(1)
            sampled = each(
                lambda i: self._sampler.choose(
                    logits[i : i + 1], sequences[i : i + 1], None if own is None else own[i]
                )[0]
            )
        return [
            failed_token(sequence, failed[i]) if i in failed else sampled[i]
            for i, sequence in enumerate(sequences)
        ]


def checked(sequences: SequenceOf[Sequence], sampled: SequenceOf[Sampled]) -> list[Sampled]:
    """Return the tokens, or an error in place of each whose largest logit is infinite or NaN.

    A NaN counts as the largest. Minus infinity means that a grammar allows no token; the grammar
    reports that itself.
    """
    return [
        token if token.largest < math.inf else Sampled(0, None, error=overflow_of(sequence))
        for sequence, token in zip(sequences, sampled, strict=True)
    ]


def overflow_of(sequence: Sequence) -> EngineError:
    """Make the error for a sequence whose logits overflowed."""
    if not sequence.digests:
        return EngineError("the base model's logits overflowed")
    names = " and ".join(digest[:12] for digest in sequence.digests)
    message = f"the values of adapter {names} are too large: the model's logits overflowed"
    return AdapterOverflow(message, param="adapters")
