"""InFlightStep: a step that was launched and whose tokens have not been read."""

from __future__ import annotations

from collections.abc import Callable
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
    has_placeholders  whether its rows are committed and placeholders stand for its tokens
    drafted           chooses further tokens of the step; None: it has no drafts
    """

    step: Step
    read: Callable[[], list[Sampled]]
    tokens: Tokens | None = None
    scores: Scores | None = None
    is_done: bool = False
    has_placeholders: bool = False
    drafted: Verification | None = None

    def choose(self) -> None:
        """Choose the tokens on the device, if that waited for the tokens of the step before."""
        if self.tokens is not None:
            self.tokens.choose()

    def append_placeholders(self, commit: Callable[[Row], None]) -> None:
        """Commit the rows and append ~i for token i, so that the next step can be scheduled.

        Only for tokens that the device chooses: it reads them as the next step's inputs.
        """
        self.commit(commit)
        self.has_placeholders = True
        for i, sequence in enumerate(self.step.sampling):
            if not sequence.has_ended:
                sequence.token_ids.append(~i)

    def commit(self, commit: Callable[[Row], None]) -> None:
        """Call `commit` with each row whose sequence goes on, unless that has been done."""
        if not self.has_placeholders:
            for row in self.step.rows:
                if row.sequence.has_ended:
                    continue
                commit(Row(row.sequence, row.num_known) if row.drafts else row)

    def resolve(self, sequence: Sequence, token_id: int) -> None:
        """Append the token of one of `step.sampling`, in place of its placeholder if it has one."""
        if self.has_placeholders:
            sequence.token_ids[-1] = token_id
        else:
            sequence.token_ids.append(token_id)

    def drop_placeholder(self, sequence: Sequence) -> None:
        """Remove the placeholder, if any, of one of `step.sampling` that gets no token."""
        if self.has_placeholders:
            sequence.token_ids.pop()

    @property
    def can_go_on(self) -> bool:
        """Whether the next step may be launched before the tokens of this one are read."""
        return self.tokens is not None and self.drafted is None

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
