"""LogitsProcessor: turns a step's logits into one token, or one error, for each sequence.

A failure of one sequence (its adapter's numbers overflow, its grammar's matcher raises) is that
sequence's error alone. The batch is handled as a whole, and row by row only if that raises, to find
the row at fault.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import AdapterOverflow, EngineError
from engine.sampling.grammar import Grammars
from engine.sampling.sampler import Draw, Sampled, Sampler
from engine.sequence import Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")


class LogitsProcessor:
    """Applies penalties, biases and grammars to logits, and chooses tokens."""

    def __init__(self, sampler: Sampler, grammars: Grammars) -> None:
        self._sampler, self._grammars = sampler, grammars

    def needs_logits_alone(self, sequences: SequenceOf[Sequence]) -> bool:
        """Whether a device can choose the next tokens of all, from the logits and `masks`."""
        return all(map(self._sampler.is_free, sequences))

    def masks(self, sequences: SequenceOf[Sequence]) -> StepMasks | None:
        """Return what masks the sequences' next tokens; None: none of them has a grammar."""
        if all(self._grammars.matcher(sequence) is None for sequence in sequences):
            return None
        return StepMasks(self._grammars, sequences)

    def draw(self, sequences: SequenceOf[Sequence]) -> Draw | None:
        """See `Sampler.draw`."""
        return self._sampler.draw(sequences)

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
            _failed(sequence, failed[i]) if i in failed else sampled[i]
            for i, sequence in enumerate(sequences)
        ]


class StepMasks:
    """The masks of one step's tokens.

    They follow from the tokens before, so a step may be launched before it has them; only the
    choice of its tokens waits for `fill`.

    sequences  of each row of the step's logits
    """

    def __init__(self, grammars: Grammars, sequences: SequenceOf[Sequence]) -> None:
        self._grammars, self._sequences = grammars, sequences
        self._failed: dict[int, Exception] = {}

    def fill(self, words: npt.NDArray[np.int32]) -> list[int]:
        """Write the rows' masks into `words` [N or more, ceil(V / 32)]; return which have one.

        The tokens before must be known. Sequences that have ended have no mask.
        """
        sequences = self._sequences
        try:
            return self._grammars.fill_masks(words, sequences)
        except Exception:
            rows = []
            for i, sequence in enumerate(sequences):
                try:
                    if self._grammars.fill_masks(words[i : i + 1], [sequence]):
                        rows.append(i)
                except Exception as error:
                    self._failed[i] = error
            return rows

    def read(self, sampled: Callable[[], list[Sampled]]) -> list[Sampled]:
        """Return the tokens, with an error in place of each whose mask could not be made."""
        tokens = sampled()
        for i, error in self._failed.items():
            tokens[i] = _failed(self._sequences[i], error)
        return tokens


def _failed(sequence: Sequence, error: Exception) -> Sampled:
    return Sampled(0, None, error=as_engine_error(sequence.request.request_id, error))


def checked(sequence: Sequence, sampled: Sampled) -> Sampled:
    """Return the token, or an error if the row's largest logit is infinite or not a number.

    A NaN counts as the largest. Minus infinity means that a grammar allows no token; the grammar
    reports that itself.
    """
    if not (math.isnan(sampled.largest) or sampled.largest == math.inf):
        return sampled
    return Sampled(0, None, error=overflow_of(sequence))


def overflow_of(sequence: Sequence) -> EngineError:
    """Make the error for a sequence whose logits overflowed."""
    if not sequence.digests:
        return EngineError("the base model's logits overflowed")
    names = " and ".join(digest[:12] for digest in sequence.digests)
    message = f"the values of adapter {names} are too large: the model's logits overflowed"
    return AdapterOverflow(message, param="adapters")


def as_engine_error(request_id: str, error: BaseException) -> EngineError:
    """Return the error for the client; log one that was not foreseen."""
    if isinstance(error, EngineError):
        return error
    log.error("request failed", exc_info=error, extra={"request_id": request_id})
    return EngineError(f"internal error: {type(error).__name__}")
