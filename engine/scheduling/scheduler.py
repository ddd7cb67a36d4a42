"""Scheduler: which sequences run in the next step. No torch here.

Iteration-level: each step carries one token of every decoding sequence and, with what is left of
the token budget, chunks of prompts. Sequences are ranked: overdue, interactive, batch
(`waiting_queue`), within each by arrival. Batch work gets what the others leave of running seats,
pages and the budget for prompts. A waiting sequence whose adapter or grammar is not ready is passed
over and blocks nobody.

Who may be overtaken, and how often:

- If not all fit, a sequence whose adapters are in the batch already may overtake those of its class
  that would add one, and any sequence may overtake one whose adapter lacks room. After `max_skips`
  overtakings of a sequence nobody of its class, or of a lower one, is admitted before it.
- An interactive sequence without room preempts running batch work that is not overdue; an overdue
  one preempts whatever arrived after it. So all waits of a sequence for later arrivals add up to
  `max_wait_s` (`max_batch_wait_s`) at most. After that it waits only for its adapter and for
  earlier arrivals. The first of all overdue sequences is never preempted, so one always advances.

When pages run out, idle pages are evicted first. Then the running sequence of the lowest rank is
preempted: its pages are released and its tokens recomputed later, unless the prefix cache still
has them. Source: Orca (OSDI'22) for iterations, Sarathi-Serve (arXiv:2403.02310) for chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from engine.errors import OutOfPages
from engine.memory.page_pool import PagePool, PageUse
from engine.memory.prefix_cache import PrefixCache
from engine.request import Priority
from engine.scheduling.page_tables import PageTables
from engine.scheduling.waiting_queue import SchedulerLimits, Urgency, WaitingQueue, insert_by_rank
from engine.sequence import Row, Sequence, Step
from engine.stats import PreemptionCause

# Largest number of waiting sequences of a class that are considered in one step.
_WINDOW = 64
_CAUSES = (PreemptionCause.OVERDUE, PreemptionCause.PRIORITY)
_NO_ROOM = "the request's adapters need more pages than pinned prefixes leave"


class Adapters(Protocol):
    """The part of `engine.adapters.store.AdapterStore` that the scheduler uses."""

    def is_resident(self, digest: str) -> bool: ...
    def lacks_room(self, digest: str) -> bool: ...
    def num_pages(self, digest: str) -> int: ...
    @property
    def is_copying(self) -> bool: ...
    def pin(self, digest: str) -> None: ...
    def unpin(self, digest: str) -> None: ...
    def evict_idle(
        self, num_pages: int, keep: Collection[str], use: PageUse = PageUse.KV
    ) -> None: ...
    def make_room(self, digest: str, keep: Collection[str]) -> bool: ...


class Scheduler:
    """Owns the waiting and the running sequences and their page tables."""

    def __init__(
        self,
        *,
        pool: PagePool,
        adapters: Adapters,
        prefixes: PrefixCache,
        page_size: int,
        limits: SchedulerLimits,
        let_pinned_go: Callable[[], bool],
        window: int | None = None,
        num_state: int = 0,
    ) -> None:
        """Make a scheduler without sequences; for `window` and `num_state` see `PageTables`.

        let_pinned_go  makes what is pinned idle for a request that has no room beside it; returns
                       whether that may give room
        """
        self._pool, self._adapters, self._page_size = pool, adapters, page_size
        self.tables = PageTables(pool, prefixes, page_size, window, num_state)
        self._limits, self._let_pinned_go = limits, let_pinned_go
        # Every running sequence must find room for its decode token in the step.
        self.max_running = min(limits.max_running, limits.max_step_tokens)
        self._in_use: Counter[str] = Counter()  # digest -> running sequences
        self._queue = WaitingQueue(limits)
        self.running: list[Sequence] = []  # the highest rank first
        self.preemptions: Counter[PreemptionCause] = Counter()  # so far
        self._now = float("-inf")  # time of the newest call that gave it

    @property
    def waiting(self) -> list[Sequence]:
        """The most urgent first."""
        return self._queue.sequences

    def add(self, sequence: Sequence, now: float) -> None:
        self._queue.enter(sequence, now)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended, and release its pages and adapters."""
        if sequence.is_running:
            self._stop(sequence)
        else:
            self._queue.leave(sequence, self._now)

    def wanted_adapters(self) -> Iterable[str]:
        """Digests that waiting sequences need, the most urgent first."""
        return (digest for sequence in self.waiting for digest in sequence.digests)

    def schedule(self, now: float) -> Step:
        """Decide the next step: take its pages, preempt and admit as needed.

        now  seconds on any clock that never goes back
        """
        self._now = now
        self._queue.promote(now)
        step = Step(budget=self._limits.max_step_tokens)
        # Decodes first: a prompt's chunk must not delay requests that already generate.
        prefills = []
        for sequence in list(self.running):
            if len(sequence.token_ids) - sequence.num_computed != 1:
                prefills.append(sequence)
            elif sequence.is_running and step.budget:  # not preempted a moment ago
                if sequence.num_computed < len(sequence.page_table) * self._page_size:
                    step.rows.append(Row(sequence, 1))  # fifteen of sixteen need no page
                    step.budget -= 1
                else:
                    self._continue(step, sequence)
        is_open = True
        for urgency in Urgency:
            own = [sequence for sequence in prefills if sequence.rank[0] == urgency]
            waiting = self._queue.of(urgency) if urgency is Urgency.OVERDUE else []
            num_before = sum(s.rank < waiting[0].rank for s in own) if waiting else len(own)
            self._continue_prompts(step, own[:num_before])
            # A sequence that was preempted in this step waits; if admitted again, it has its row.
            after = [sequence for sequence in own[num_before:] if sequence.is_running]
            is_open = is_open and self._admit(step, urgency)
            self._continue_prompts(step, after)
        step.group_by_adapter()
        return step

    def can_admit(self, now: float) -> bool:
        """Return whether a waiting sequence might get into the next step."""
        self._now = now
        self._queue.promote(now)
        if not self.waiting:
            return False
        if len(self.running) < self.max_running or self._victim(self.waiting[0]):
            return True
        return any(_outranks(sequence, self.running[-1]) for sequence in self.waiting)

    def most_held(self, num_tokens: int) -> int:
        """See `PageTables.most_held`."""
        return self.tables.most_held(num_tokens)

    def reserve_next_pages(self, rows: list[Row]) -> list[tuple[int, int, int]] | None:
        """See `PageTables.reserve_next_pages`."""
        return self.tables.reserve_next_pages(rows)

    def commit(self, row: Row) -> None:
        """Note that a row has run: its tokens are in the pages, and full pages can be shared."""
        self.tables.commit(row)

    def count_uncomputed(self, sequence: Sequence) -> int:
        """Return the fewest tokens that it would have to compute if it ran now."""
        if sequence.is_running:
            return sequence.num_uncomputed
        pages = self.tables.find(sequence)
        self.tables.give_back(sequence, pages)
        return sequence.num_tokens - len(pages) * self._page_size

    def check_integrity(self) -> None:
        """Raise AssertionError unless page tables, pins and orders agree."""
        self._queue.check_integrity(self._now)
        ranks = [sequence.rank for sequence in self.running]
        assert ranks == sorted(set(ranks)), "sequences out of order"
        for sequence in self.running:
            assert sequence.is_running
            self.tables.check_integrity(sequence)
            assert all(self._adapters.is_resident(digest) for digest in sequence.digests)
        assert self._in_use == Counter(d for s in self.running for d in s.digests)
        if self._limits.max_adapters is not None:
            assert len(self._in_use) <= self._limits.max_adapters

    # Running sequences

    def _continue_prompts(self, step: Step, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.is_running and step.budget:
                self._continue(step, sequence)

    def _continue(self, step: Step, sequence: Sequence) -> None:
        num_tokens = self._chunk(step, sequence)
        num_new = self.tables.count_missing(sequence, num_tokens)
        if num_new <= 0:
            step.rows.append(Row(sequence, num_tokens))
            step.budget -= num_tokens
        elif self._make_room(step, sequence, num_new):
            self._run(step, sequence, num_tokens)

    def _chunk(self, step: Step, sequence: Sequence) -> int:
        """Return how many tokens it computes next.

        If pages behind the window are given back, no more than the free pages hold, but at least a
        page's: each chunk makes room for the next one.
        """
        num_tokens = self.tables.cut(sequence, min(sequence.num_uncomputed, step.budget))
        if self.tables.gives_back:
            while num_tokens > self._page_size and not self._is_free(
                self.tables.count_missing(sequence, num_tokens), sequence
            ):
                num_tokens //= 2
        return num_tokens

    def _run(self, step: Step, sequence: Sequence, num_tokens: int) -> None:
        """Add a row to the step and take its pages, which are free."""
        self.tables.extend(sequence, num_tokens)
        step.rows.append(Row(sequence, num_tokens))
        step.budget -= num_tokens

    def _make_room(self, step: Step, sequence: Sequence, num_new: int) -> bool:
        """Free `num_new` pages for a running sequence; return False if it must skip the step."""
        while not self._pool.can_take(num_new):
            if self._is_free(num_new, sequence):
                break
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                if sequence.is_assumed:  # it may not need the page
                    return False
                if self._is_free_at_last(num_new, sequence):
                    break
                if self._is_all_there_is():
                    step.failed.append((sequence, _too_small(self._pool, num_new)))
                return False
            self._preempt(step, victim, PreemptionCause.PAGES)
            if victim is sequence:
                return False
        return True

    def restart(self, rows: list[Row]) -> None:
        """Compute sequences again whose states a step has changed that does not count."""
        for sequence in [row.sequence for row in rows]:
            if sequence.is_running and sequence.state and not sequence.has_new_state:
                self._requeue(sequence, PreemptionCause.GUESS)

    def _preempt(self, step: Step, victim: Sequence, cause: PreemptionCause) -> None:
        for row in [row for row in step.rows if row.sequence is victim]:
            step.rows.remove(row)
            step.budget += row.num_tokens
        self._requeue(victim, cause)

    def _requeue(self, sequence: Sequence, cause: PreemptionCause) -> None:
        self._stop(sequence)
        self._queue.enter(sequence, self._now)
        self.preemptions[cause] += 1

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.is_running = False
        self.tables.clear(sequence)
        for digest in sequence.digests:
            self._adapters.unpin(digest)
            self._in_use[digest] -= 1
            if not self._in_use[digest]:
                del self._in_use[digest]

    # Waiting sequences

    def _admit(self, step: Step, urgency: Urgency) -> bool:
        """Admit waiting sequences of one urgency; return False if no lower one may be admitted."""
        window = self._candidates(urgency)
        if any(sequence.is_assumed for sequence in window):  # preempted in this step: comes first
            return False
        passed: list[Sequence] = []  # for lack of room for their adapters
        while window:
            if urgency is not Urgency.OVERDUE and any(map(self._is_spent, passed)):
                return False
            chosen = self._choose(window)
            sequence = window[chosen]
            has_seat = len(self.running) < self.max_running or self._preempt_for(step, sequence)
            if not has_seat or not step.budget:
                return False
            if not self._claim_adapters(step, sequence):
                if _has_failed(step, sequence):
                    del window[chosen]
                    continue
                if urgency is Urgency.OVERDUE:
                    return False
                passed.append(window.pop(chosen))
                continue
            if not self._claim_pages(step, sequence):
                if _has_failed(step, sequence):
                    del window[chosen]
                    continue
                return False
            for overtaken in (*passed, *window[:chosen]):
                overtaken.num_skips += 1
            del window[chosen]
            if len(sequence.siblings) > 1:
                window = [s for s in window if not _is_prompt_under_way(s)]
        return not passed  # else lower classes would take what it waits for

    def _candidates(self, urgency: Urgency) -> list[Sequence]:
        """Return the first waiting sequences of this urgency that lack nothing but room."""
        waiting = self._queue.of(urgency)
        if not waiting:
            return []
        if len(self.running) >= self.max_running and self._victim(waiting[0]) is None:
            return []
        window: list[Sequence] = []
        for sequence in waiting:
            if self._lacks_room_alone(sequence):
                window.append(sequence)
                if len(window) == _WINDOW:
                    break
        return window

    def _lacks_room_alone(self, sequence: Sequence) -> bool:
        if sequence.is_waiting_for_grammar or _is_prompt_under_way(sequence):
            return False
        adapters = self._adapters
        return all(adapters.is_resident(d) or adapters.lacks_room(d) for d in sequence.digests)

    def _choose(self, window: list[Sequence]) -> int:
        """Choose the next one: the first, unless one that adds no adapter may overtake it."""
        if window[0].rank[0] is Urgency.OVERDUE:
            return 0
        if len(window) <= self.max_running - len(self.running):
            return 0
        for i, sequence in enumerate(window):
            if all(digest in self._in_use for digest in sequence.digests):
                return i
            if self._is_spent(sequence):
                break
        return 0

    def _is_spent(self, sequence: Sequence) -> bool:
        return sequence.num_skips >= self._limits.max_skips

    def _victim(self, sequence: Sequence) -> Sequence | None:
        """Return the running sequence that has to make room for a waiting one, if any."""
        if not self.running:
            return None
        if _outranks(sequence, self.running[-1]):
            return self.running[-1]
        if sequence.rank[0] is Urgency.OVERDUE:
            return next((s for s in reversed(self.running) if s.arrival > sequence.arrival), None)
        return None

    def _preempt_for(self, step: Step, sequence: Sequence) -> bool:
        """Preempt one that has to make room for `sequence`; False when there is none."""
        victim = self._victim(sequence)
        if victim is not None:
            self._preempt(step, victim, _CAUSES[_outranks(sequence, victim)])
        return victim is not None

    def _claim_adapters(self, step: Step, sequence: Sequence) -> bool:
        """Return whether the sequence's adapters are resident and within the limit of adapters.

        If pages for them are missing, frees them for `AdapterStore.poll` to take.
        """
        missing = [d for d in sequence.digests if not self._adapters.is_resident(d)]
        num_pages = sum(self._adapters.num_pages(digest) for digest in missing)
        while self._has_too_many_adapters(sequence) or missing:
            if self._victim(sequence) is None:
                if missing and self._is_out_of_reach(missing[0], sequence):
                    step.failed.append((sequence, OutOfPages(_NO_ROOM)))
                return False
            if not self._has_too_many_adapters(sequence) and self._is_free(
                num_pages, sequence, PageUse.ADAPTER
            ):
                return False  # until they have been copied
            self._preempt_for(step, sequence)
        return True

    def _is_out_of_reach(self, digest: str, sequence: Sequence) -> bool:
        """Return whether the first waiting sequence lacks an adapter though nothing runs.

        That happens if prefixes were pinned after the request had been accepted.
        """
        if self.running or self.waiting[0] is not sequence or not self._is_all_there_is():
            return False
        return not (self._adapters.make_room(digest, sequence.digests) or self._let_pinned_go())

    def _claim_pages(self, step: Step, sequence: Sequence) -> bool:
        """Start the sequence if there are pages for it, and put its first chunk into the step."""
        pages = self.tables.find(sequence)
        num_new = self.tables.count_to_start(sequence, pages)
        while not self._is_free(num_new, sequence):
            if not self._preempt_for(step, sequence):
                if not self.running and self._is_free_at_last(num_new, sequence):
                    break
                self.tables.give_back(sequence, pages)
                if not self.running and self._is_all_there_is():
                    step.failed.append((sequence, _too_small(self._pool, num_new)))
                return False
        self._start(sequence, pages)
        self._run(step, sequence, self._chunk(step, sequence))
        return True

    def _is_free(self, num_pages: int, sequence: Sequence, use: PageUse = PageUse.KV) -> bool:
        """Return whether `num_pages` pages can be taken, after evicting what is idle.

        Keeps its own adapters, and those that an overdue sequence before it has waited for.
        """
        if not self._pool.can_take(num_pages, use):
            keep = set(sequence.digests)
            if self.waiting and self.waiting[0].rank < sequence.rank:
                keep.update(self.waiting[0].digests)
            self._adapters.evict_idle(num_pages, keep=keep, use=use)
            self._pool.is_short |= self._pool.missing(num_pages, use)[1] > 0
        return self._pool.can_take(num_pages, use)

    def _is_all_there_is(self) -> bool:
        """Return whether no page comes free: none is lent, no adapter waits for its other parts."""
        return not (self._adapters.is_copying or self._pool.num_used(PageUse.LENT))

    def _is_free_at_last(self, num_pages: int, sequence: Sequence) -> bool:
        """As `_is_free`, for the only sequence that can run: keeps only its own adapters."""
        if not self._adapters.is_copying:  # else parts of a blend would be evicted before the last
            self._adapters.evict_idle(num_pages, keep=sequence.digests)
            if not self._pool.can_take(num_pages) and self._let_pinned_go():
                self._adapters.evict_idle(num_pages, keep=sequence.digests)
        return self._pool.can_take(num_pages)

    def _has_too_many_adapters(self, sequence: Sequence) -> bool:
        most = self._limits.max_adapters
        new = sum(digest not in self._in_use for digest in sequence.digests)
        return most is not None and new > 0 and len(self._in_use) + new > most

    def _start(self, sequence: Sequence, pages: list[int]) -> None:
        self._queue.leave(sequence, self._now)
        insert_by_rank(self.running, sequence)
        sequence.is_running = True
        self.tables.start(sequence, pages)
        for digest in sequence.digests:
            self._adapters.pin(digest)
            self._in_use[digest] += 1


def _outranks(sequence: Sequence, running: Sequence) -> bool:
    """Return whether it is interactive, and `running` is batch work that is not overdue."""
    return sequence.request.priority is Priority.INTERACTIVE and running.rank[0] is Urgency.BATCH


def _is_prompt_under_way(sequence: Sequence) -> bool:
    """Return whether a sibling is computing the prompt, whose pages it will share."""
    running = [s for s in sequence.siblings if s.is_running]
    return bool(running) and not any(s.has_prompt for s in running)


def _has_failed(step: Step, sequence: Sequence) -> bool:
    return bool(step.failed) and step.failed[-1][0] is sequence


def _too_small(pool: PagePool, num_pages: int) -> OutOfPages:
    return OutOfPages(
        f"the request alone needs {num_pages} more pages than are free of {pool.num_pages}"
    )
