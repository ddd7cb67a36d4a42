"""The masks of one step: made while its pass runs, before its tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import GrammarFailed
from engine.sampling.failures import failed_token
from engine.sampling.grammar import Grammars, Matcher
from engine.sampling.masks import Mask, Masked
from engine.sampling.sampler import Sampled
from engine.sampling.walk import Behind
from engine.sequence import Row, Sequence

_LOST = "LostBehindForcedText"


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
            tokens[i] = failed_token(self._sequences[i], error)
        return tokens


class DraftMasks:
    """The masks of the wanted tokens of rows that sample.

    The mask behind a draft is that of a grammar that has accepted it, whether it is right or not;
    if it is not, nobody asks for the token.
    """

    def __init__(self, grammars: Grammars, rows: SequenceOf[Row]) -> None:
        self._grammars, self._rows = grammars, rows
        self._counts = [row.num_wanted if row.drafts else 1 for row in rows]
        self._failed: list[tuple[int, Row, Exception]] = []  # (first of its tokens, row, why)

    def fill(self, words: npt.NDArray[np.int32]) -> list[int]:
        """Write the masks into `words` [N or more, ceil(V / 32)]; return the rows that have one.

        Cuts drafts that are not legal, and those behind which the grammar cannot be followed.
        """
        filled: list[int] = []
        plans: list[tuple[int, int, Row, Matcher, _Plan | None]] = []
        places: list[Masked] = []
        first = 0
        for row, count in zip(self._rows, self._counts, strict=True):
            matcher = self._grammars.matcher(row.sequence)
            if matcher is not None:
                try:
                    plan = self._plan(row, matcher) if row.drafts else None
                except Exception as error:
                    self._failed.append((first, row, error))
                else:
                    plans.append((first, count, row, matcher, plan))
                    if plan is None or plan.here is not None:
                        places.append(matcher)
                    if plan is not None and plan.last is not None:
                        places.append(plan.last)
            first += count
        self._grammars.compute_masks((), places)
        for first, count, row, matcher, plan in plans:
            own: list[int] = []
            try:
                if plan is not None:
                    own = plan.fill(words, first)
                if not own:
                    own = _fill(matcher, row, words, first)
            except Exception as error:
                self._failed.append((first, row, error))
            filled += own
            if len(own) < count:
                filled += self._fill_unasked(words, own, first, count)
        return filled

    def _fill_unasked(
        self, words: npt.NDArray[np.int32], own: list[int], first: int, count: int
    ) -> list[int]:
        """Leave one token to the rows behind cut drafts: it is sure, and nobody asks for it."""
        end = first + count
        begin = own[-1] + 1 if own else end
        if begin < end:
            words[begin:end] = 0
            words[begin:end, 0] = 1
        return list(range(begin, end))

    def _plan(self, row: Row, matcher: Matcher) -> _Plan | None:
        """Plan the masks of a row with drafts if all of them are legal."""
        if row.is_certain:
            return _Plan(None, [], matcher.behind(row.drafts), is_certain=True)
        masks = matcher.masks_ahead(row.drafts)
        if masks is None:
            return None
        last = matcher.behind(row.drafts)
        if last is None:
            return None
        wanted = row.wanted[:-1]
        own = [mask for depth in wanted if depth and (mask := masks[depth - 1]) is not None]
        here = matcher if wanted[0] == 0 else None
        if len(own) < len(wanted) - (here is not None):
            return None
        return _Plan(here, own, last)

    def read(self, sampled: Callable[[], list[Sampled]]) -> list[Sampled]:
        """Return the tokens, with an error in place of each whose mask could not be made."""
        tokens = sampled()
        for first, row, error in self._failed:
            tokens[first] = failed_token(row.sequence, error)
        return tokens


@dataclass(frozen=True, slots=True)
class _Plan:
    """The wanted masks of one row.

    here   whose mask is the first one; None: none is wanted before the first draft
    known  those behind further drafts, but for the last
    last   the place behind all drafts; None: the grammar cannot be followed there
    is_certain  whether all drafts are: then they cannot be cut
    """

    here: Matcher | None
    known: list[Mask]
    last: Behind | None
    is_certain: bool = False

    def fill(self, words: npt.NDArray[np.int32], first: int) -> list[int]:
        """Write the masks into `words` from `first` on; return which were written, if they can."""
        mask = None if self.last is None else self.last.compute()
        if mask is None:
            if self.is_certain:
                raise GrammarFailed(_LOST)
            return []
        own = [*self.known, mask] if self.here is None else [self.here.mask, *self.known, mask]
        for i, each in enumerate(own, first):
            each.write(words[i])
        return list(range(first, first + len(own)))


def _fill(matcher: Matcher, row: Row, words: npt.NDArray[np.int32], first: int) -> list[int]:
    """Write the masks of one row into `words` from `first` on; return which were written."""
    if not row.drafts:
        matcher.fill_mask(words[first])
        return [first]
    wanted = row.wanted
    masks = [matcher.mask if wanted[0] == 0 else None]
    masks += matcher.masks_behind(row.drafts, [d in wanted for d in range(1, len(row.drafts) + 1)])
    own = [depth for depth in wanted if depth < len(masks)]
    if len(masks) <= len(row.drafts):  # the next draft is not legal
        if not own:
            raise GrammarFailed(_LOST)
        row.cut(own[-1])
    for i, depth in enumerate(own):
        if depth == 0:
            matcher.fill_mask(words[first])  # also of a matcher that has failed
        else:
            mask = masks[depth]
            assert mask is not None
            mask.write(words[first + i])
    return list(range(first, first + len(own)))
