"""A step that has been launched and whose tokens have not been read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.execution.gpu_runner import GpuRunner, Tokens
from engine.execution.prompt_scores import Scores
from engine.sampling.sampler import Draw, Sampled
from engine.sequence import Row, Sequence, Step


@dataclass(slots=True, kw_only=True)
class Flight:
    """`finish` waits for the step and gives one token for each of `sampling`.

    sampling    sequences that get a token, in the order of the step's rows
    tokens      of a step that chose its tokens on the device
    runner      who can launch the same rows' next step before this one's tokens are read
    draw        what the rows that are not greedy draw by
    scores      what the step tells of prompts
    is_assumed  whether the step counts as done and its tokens as there, though nobody knows them
    """

    step: Step
    sampling: list[Sequence]
    finish: Callable[[], list[Sampled]]
    tokens: Tokens | None = None
    runner: GpuRunner | None = None
    draw: Draw | None = None
    scores: Scores | None = None
    is_assumed: bool = False

    def assume(self, commit: Callable[[Row], None]) -> None:
        """Let the next step be planned: token i of this one, not yet read, is ~i until `tell`."""
        self.commit(commit)
        self.is_assumed = True
        for i, sequence in enumerate(self.sampling):
            if not sequence.has_ended:
                sequence.token_ids.append(~i)

    def commit(self, commit: Callable[[Row], None]) -> None:
        """Call `commit` with each row whose sequence goes on, unless that has been done."""
        if not self.is_assumed:
            for row in self.step.rows:
                if not row.sequence.has_ended:
                    commit(row)

    def tell(self, sequence: Sequence, token_id: int) -> None:
        """The token of one of `sampling`, in place of the assumed one."""
        if self.is_assumed:
            sequence.token_ids[-1] = token_id
        else:
            sequence.token_ids.append(token_id)

    def tell_none(self, sequence: Sequence) -> None:
        """One of `sampling` has no token: an assumed one never was."""
        if self.is_assumed:
            sequence.token_ids.pop()

    @property
    def can_go_on(self) -> bool:
        """Whether `go_on` may follow: the rows are decodes, and all of them still have pages."""
        if self.runner is None:
            return False
        return not any(row.sequence.has_left for row in self.step.rows)

    def go_on(self, new_pages: list[tuple[int, int, int]]) -> Flight:
        """Launch the step after this one, of the same rows; the caller has asked `can_go_on`.

        new_pages  (row, index in its page table, page) that the rows need for it
        """
        assert self.runner is not None and self.is_assumed
        tokens = self.runner.go_on(new_pages, self.draw)
        return Flight(
            step=self.step,
            sampling=self.sampling,
            finish=tokens.sampled,
            tokens=tokens,
            runner=self.runner,
            draw=self.draw,
        )

    @property
    def went_wrong(self) -> bool:
        """Whether a token that a following step went on from is not what `finish` gave."""
        return self.tokens is not None and self.tokens.were_wrong
