"""InFlightStep: a step that was launched and whose tokens have not been read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine.execution.gpu_runner import Tokens
from engine.execution.prompt_scores import Scores
from engine.execution.verification import Verification
from engine.sampling.sampler import Sampled
from engine.sequence import Row, Sequence, Step


@dataclass(slots=True, kw_only=True)
class InFlightStep:
    """The result of `ModelRunner.launch`, on a CPU and on a GPU.

    read              waits for the step and returns one token for each of `step.sampling`
    tokens            the tokens, if the device chooses them; None: the host does, in `read`
    scores            the prompt log-probabilities that the step computes
    is_done           whether the step has run already, as on a CPU
    placed            sequences and how many of their last tokens stand for this step's: drafts,
                      and a placeholder; its rows are committed then. None: none do
    drafted           chooses further tokens of the step; None: it has no drafts
    void              sequences whose row counts for nothing: it followed from a wrong draft
    """

    step: Step
    read: Callable[[], list[Sampled]]
    tokens: Tokens | None = None
    scores: Scores | None = None
    is_done: bool = False
    placed: list[tuple[Sequence, int]] | None = None
    drafted: Verification | None = None
    void: set[Sequence] = field(default_factory=set)

    def choose(self) -> None:
        """Choose the tokens on the device, if that waited for the tokens of the step before."""
        if self.tokens is not None:
            self.tokens.choose()

    def append_placeholders(self, commit: Callable[[Row], None]) -> None:
        """Commit the rows and append ~i for token i, so that the next step can be scheduled.

        Only for tokens that the device chooses: it reads them as the next step's inputs. Drafts are
        taken to be right (`can_go_on`) and appended before.
        """
        drafts = {row.sequence: row.drafts for row in self.step.rows if row.drafts}
        self.placed = []
        for row in self.step.rows:
            sequence = row.sequence
            if self._goes_on(sequence):
                if row.drafts:
                    sequence.token_ids.extend(row.drafts)
                    sequence.is_assumed = row.num_sure < len(row.drafts)
                commit(row)
        sampling = self.step.sampling
        newest = range(len(sampling)) if self.drafted is None else self.drafted.newest()
        for i, sequence in zip(newest, sampling, strict=True):
            if self._goes_on(sequence):
                sequence.token_ids.append(~i)
                self.placed.append((sequence, 1 + len(drafts.get(sequence, ()))))

    def remove_placeholders(self) -> None:
        """Remove from the sequences what stands for the step's tokens, now that they are read."""
        for sequence, count in self.placed or ():
            del sequence.token_ids[-count:]
            sequence.is_assumed = False

    def commit(self, commit: Callable[[Row], None]) -> None:
        """Call `commit` with each row whose sequence continues, unless that has been done."""
        if self.placed is None:
            for row in self.step.rows:
                if self._goes_on(row.sequence):
                    commit(Row(row.sequence, row.num_known) if row.drafts else row)

    def _goes_on(self, sequence: Sequence) -> bool:
        return not sequence.has_ended and sequence not in self.void

    def further(
        self, commit: Callable[[Row], None]
    ) -> Iterator[tuple[list[Sequence], list[Sampled]]]:
        """Yield sequences whose newest token is the one drafted, each with its next token.

        See `Verification.go_on`.
        """
        if self.drafted is not None:
            yield from self.drafted.go_on(commit if self.placed is None else None)

    def misled(self) -> list[Sequence]:
        """Return the sequences to which drafts were appended that turned out to be wrong."""
        if self.drafted is None or self.placed is None:
            return []
        return [row.sequence for row in self.drafted.wrong_rows() if not row.sequence.has_ended]

    @property
    def can_go_on(self) -> bool:
        """Return whether the next step may be launched before the tokens of this one are read."""
        if self.tokens is None:
            return False
        return self.drafted is None or all(row.is_ahead or row.is_certain for row in self.step.rows)

    @property
    def can_replay(self) -> bool:
        """Return whether the next step may replay the graph: decodes that all keep their pages."""
        if self.tokens is None or not self.tokens.can_replay:
            return False
        return not self.void and not any(
            row.sequence.has_left or row.sequence.has_new_state for row in self.step.rows
        )

    @property
    def is_mispredicted(self) -> bool:
        """Return whether the next step took another token from the device than `read` returned."""
        return self.tokens is not None and self.tokens.were_wrong
