"""StepCosts: what one more row costs a step, and what it costs to wait for tokens before drafting.

Measured, for each kind of device; the figures are shares of a step without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What decides whether a draft pays.

    row           of one more row, of what a step of no row would take
    waiting       of launching a step only when the tokens before it are known
    max_requests  more in a step than this, and none of them has drafts
    max_rows      of a step with drafts
    only_decodes  whether a step that computes prompts has no drafts
    """

    row: float
    waiting: float
    max_requests: int
    max_rows: int
    only_decodes: bool

    def least_chance(self, num_sampling: int, num_rows: int, num_drafts: int) -> float:
        """Return how likely to be right a draft must be, with so many of its sequence before it.

        A step of R rows costs 1 + cR and gives a token to each of its S sequences; one more row
        pays if it gives more tokens for its c than that.
        """
        return num_sampling * self.row / (1.0 + self.row * (num_rows + num_drafts))


#: From bench/results/cpu.json: 16 rows take 2.4 times as long as one. Nothing runs ahead there.
CPU = StepCosts(row=0.1, waiting=0.2, max_requests=1 << 20, max_rows=1 << 20, only_decodes=False)

#: From bench/results/targets-h200.json: one row takes 4.60 ms, 64 take 5.50, and 64 of one adapter
#: 6.15 after 4.89. A step that waits takes 0.7 to 1 ms more. With forced text 16 requests of 16
#: adapters were 1.11 times as fast as without drafts, 64 of 64 only 0.88 times.
GPU = StepCosts(row=0.004, waiting=0.2, max_requests=24, max_rows=512, only_decodes=True)
