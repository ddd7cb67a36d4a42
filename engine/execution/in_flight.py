"""A step that has been launched and whose tokens have not been read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.execution.gpu_runner import Tokens
from engine.execution.prompt_scores import Scores
from engine.sampling.sampler import Sampled
from engine.sequence import Row, Sequence, Step


@dataclass(slots=True, kw_only=True)
class InFlightStep:
    """What `ModelRunner.launch` returns, on a CPU and on a GPU.

    read              waits for the step and gives one token for each of `step.sampling`
    tokens            of a step that chose its tokens on the device; None: the host chooses them
    scores            what the step tells of prompts
    is_done           whether the step has run, so that reading its tokens waits for nothing
    has_placeholders  whether the step counts as done and its tokens as there, though nobody
                      knows them
    """

    step: Step
    read: Callable[[], list[Sampled]]
    tokens: Tokens | None = None
    scores: Scores | None = None
    is_done: bool = False
    has_placeholders: bool = False

    def append_placeholders(self, commit: Callable[[Row], None]) -> None:
        """Let the next step be planned: token i of this one is ~i until `resolve`.

        Only where the device chooses the tokens: there they are the next step's inputs.
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
                if not row.sequence.has_ended:
                    commit(row)

    def resolve(self, sequence: Sequence, token_id: int) -> None:
        """Give one of `step.sampling` its token, in place of its placeholder."""
        if self.has_placeholders:
            sequence.token_ids[-1] = token_id
        else:
            sequence.token_ids.append(token_id)

    def drop_placeholder(self, sequence: Sequence) -> None:
        """One of `step.sampling` has no token."""
        if self.has_placeholders:
            sequence.token_ids.pop()

    @property
    def can_replay(self) -> bool:
        """Whether the same rows can go on at once: decodes of a graph that all keep their pages."""
        if self.tokens is None or not self.tokens.can_replay:
            return False
        return not any(row.sequence.has_left for row in self.step.rows)

    @property
    def is_mispredicted(self) -> bool:
        """Whether a step that was launched after this one read another token than `read` gave."""
        return self.tokens is not None and self.tokens.were_wrong
