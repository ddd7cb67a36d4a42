"""A step that has been launched and whose tokens have not been read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.gpu_runner import GpuRunner, Tokens
from engine.sampler import Draw, Sampled
from engine.sequence import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """`finish` waits for the step and gives one token for each row that samples.

    tokens  of a step that chose its tokens on the device
    runner  who can launch the same rows' next step before this one's tokens are read
    draw    what the rows that are not greedy draw by
    """

    step: Step
    finish: Callable[[], list[Sampled]]
    tokens: Tokens | None = None
    runner: GpuRunner | None = None
    draw: Draw | None = None

    def go_on(self, new_pages: list[tuple[int, int, int]]) -> Flight:
        """Launch the step after this one, of the same rows; there is a `runner`.

        new_pages  (row, index in its page table, page) that the rows need for it
        """
        assert self.runner is not None
        tokens = self.runner.go_on(new_pages, self.draw)
        return Flight(
            step=self.step,
            finish=tokens.sampled,
            tokens=tokens,
            runner=self.runner,
            draw=self.draw,
        )

    @property
    def went_wrong(self) -> bool:
        """Whether a token that a following step went on from is not what `finish` gave."""
        return self.tokens is not None and self.tokens.were_wrong
