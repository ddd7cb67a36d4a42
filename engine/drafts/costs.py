"""StepCosts: costs of one more row in a step, and of waiting for tokens before drafting.

The cost of a row is measured on the card that the engine runs on; the others once for each kind of
device, as shares of a step without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.drafts.heads import Asking

#: (rows, time) of steps, the fewest rows first, at least two, in any unit of time.
StepTimes = tuple[tuple[int, float], ...]
#: Least share of a step that a row is taken to cost: rows of a measured step have no context and no
#: adapter.
_LEAST_SHARE = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """The costs that decide whether a draft pays.

    times         of steps of some numbers of rows; between them a row costs the same
    waiting       cost of launching a step only when the tokens before it are known
    waiting_each  the same for each of its requests in addition: the search for drafts
    following     the same for each request with a grammar: drafts are walked through it, and masks
                  are computed
    asking        cost of asking the heads of adapters
    max_asked     more requests in a step than this, and their heads are not asked
    max_requests  more in a step than this, and none of them has drafts
    max_rows      of a step with drafts
    only_decodes  whether a step that computes prompts has no drafts
    """

    times: StepTimes
    waiting: float
    waiting_each: float
    following: float
    asking: Asking
    max_asked: int
    max_requests: int
    max_rows: int
    only_decodes: bool

    def least_chance(self, num_sampling: int, num_rows: int, num_drafts: int) -> float:
        """Return the smallest chance of being right at which a draft pays.

        A step of R rows takes t(R) and gives a token to each of its S sequences; one more row pays
        if it gives more tokens for its t(R + 1) - t(R) than that.
        """
        rows = num_rows + num_drafts
        after = 1
        while after + 1 < len(self.times) and self.times[after][0] <= rows:
            after += 1
        (few, least), (many, most) = self.times[after - 1], self.times[after]
        row = (most - least) / (many - few)
        return num_sampling * row / (least + row * (rows - few))

    def measured(self, times: StepTimes) -> StepCosts:
        """Return these costs with the times of a card; the same if there are fewer than two.

        More rows never take less time, and each takes a thousandth of the smallest step at least.
        """
        if len(times) < 2:
            return self
        least = _LEAST_SHARE * times[0][1]
        rising = [times[0]]
        for rows, took in times[1:]:
            before, previous = rising[-1]
            rising.append((rows, max(took, previous + least * (rows - before))))
        return replace(self, times=tuple(rising))


#: From bench/results/cpu.json: 16 rows take 2.4 times as long as one. Nothing runs ahead there. The
#: heads' pass reads the LM head once for all, and computes a row of it for each head.
CPU = StepCosts(
    times=((0, 1.0), (10, 2.0)),
    waiting=0.2,
    waiting_each=0.0,
    following=0.0,
    asking=Asking(once=2.0, each=0.2),
    max_asked=1 << 20,
    max_requests=1 << 20,
    max_rows=1 << 20,
    only_decodes=False,
)

#: Where nothing was measured, times are those of bench/results/targets-h200.json: one row takes
#: 4.60 ms, 64 take 5.50, and 64 of one adapter 6.15 after 4.89. A step that waits takes 0.7 to 1 ms
#: more for one request, and for 16 of free text. With grammars the whole step took 6.0 ms for one
#: request, 10.1 for four and 15.6 for sixteen, after 4.8, 5.0 and 5.7 without drafts
#: (drafts_gpu.py, before forced text was taken ahead). Reading an LM head of 1 GB takes 0.25 ms; a
#: head is some ten launches.
GPU = StepCosts(
    times=((0, 1.0), (500, 3.0)),
    waiting=0.15,
    waiting_each=0.005,
    following=0.1,
    asking=Asking(once=12.0, each=3.0),
    max_asked=8,
    max_requests=128,
    max_rows=512,
    only_decodes=True,
)
