"""InFlightStep: a step that was launched and whose tokens have not been read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.execution.gpu_runner import Tokens
from engine.execution.prompt_scores import Scores
from engine.execution.verification import Verification
from engine.sampling.sampler import Sampled
from engine.sequence import Row, Sequence, Step


@dataclass(slots=True, kw_only=True)
class InFlightStep:
    """What `ModelRunner.launch` returns, on a CPU and on a GPU.

    read              waits for the step and returns one token for each of `step.sampling`
    tokens            the tokens, if the device chooses them; None: the host does, in `read`
    scores            the prompt log-probabilities that the step computes
    is_done           whether the step has run already, as on a CPU
    placed            sequences and how many of their last tokens stand for this step's: certain
                      drafts, and a placeholder; its rows are committed then. None: none do
    drafted           chooses further tokens of the step; None: it has no drafts
    """

    step: Step
    read: Callable[[], list[Sampled]]
    tokens: Tokens | None = None
    scores: Scores | None = None
    is_done: bool = False
    placed: list[tuple[Sequence, int]] | None = None
    drafted: Verification | None = None

    def choose(self) -> None:
        """Choose the tokens on the device, if that waited for the tokens of the step before."""
        if self.tokens is not None:
            self.tokens.choose()

    def append_placeholders(self, commit: Callable[[Row], None]) -> None:
        """Commit the rows and append ~i for token i, so that the next step can be scheduled.

        Only for tokens that the device chooses: it reads them as the next step's inputs. Drafts are
        certain (`can_go_on`): they are appended before.
        """
        drafts = {row.sequence: row.drafts for row in self.step.rows if row.drafts}
        self.placed = []
        for row in self.step.rows:
            if not row.sequence.has_ended:
                row.sequence.token_ids.extend(row.drafts)
                commit(row)
        for i, sequence in enumerate(self.step.sampling):
            if not sequence.has_ended:
                sequence.token_ids.append(~i)
                self.placed.append((sequence, 1 + len(drafts.get(sequence, ()))))

    def remove_placeholders(self) -> None:
        """Remove from the sequences what stands for the step's tokens, now that they are read."""
        for sequence, count in self.placed or ():
            del sequence.token_ids[-count:]

    def commit(self, commit: Callable[[Row], None]) -> None:
        """Call `commit` with each row whose sequence goes on, unless that has been done."""
        if self.placed is None:
            for row in self.step.rows:
                if row.sequence.has_ended:
                    continue
                commit(Row(row.sequence, row.num_known) if row.drafts else row)

    def further(
        self, commit: Callable[[Row], None]
    ) -> Iterator[tuple[list[Sequence], list[Sampled]]]:
        """Yield sequences whose newest token is the one drafted, each with its next token.

        See `Verification.go_on`.
        """
        if self.drafted is not None:
            yield from self.drafted.go_on(commit if self.placed is None else _ignore)

    @property
    def can_go_on(self) -> bool:
        """Whether the next step may be launched before the tokens of this one are read."""
        if self.tokens is None:
            return False
        return self.drafted is None or all(row.is_certain for row in self.step.rows)

    @property
    def can_replay(self) -> bool:
        """Whether the next step may replay the graph: decodes that all keep their pages."""
        if self.tokens is None or not self.tokens.can_replay:
            return False
        return not any(row.sequence.has_left for row in self.step.rows)

    @property
    def is_mispredicted(self) -> bool:
        """Whether the next step took another token from the device than `read` returned."""
        return self.tokens is not None and self.tokens.were_wrong


def _ignore(row: Row) -> None:
    """Commit nothing: the whole row has been committed."""
