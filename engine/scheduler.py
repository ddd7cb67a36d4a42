"""Who runs in the next step. No torch here.

Iteration-level: each step carries one token of every decoding request and, with what is left of
the token budget, chunks of prompts. Requests run in order of arrival; a request whose adapter or
grammar is not ready is passed over and blocks nobody. When pages run out, idle prefixes and
adapters go first, then the youngest running request is preempted: its pages are released and its
tokens recomputed later, unless the prefix cache still has them. Source: Orca (OSDI'22) for
iterations, Sarathi-Serve (arXiv:2403.02310) for chunks.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol

from engine.errors import OutOfPages
from engine.memory import PagePool, PageUse
from engine.prefix_cache import AdapterKey, PageKeys, PrefixCache
from engine.sequence import Row, Sequence, Step


class Adapters(Protocol):
    """What the scheduler needs of `engine.adapters.AdapterStore`."""

    def is_resident(self, digest: str) -> bool: ...

    def lacks_room(self, digest: str) -> bool: ...

    @property
    def is_loading(self) -> bool: ...

    def pin(self, digest: str) -> None: ...

    def unpin(self, digest: str) -> None: ...

    def evict_idle(self, num_pages: int, keep: Collection[str]) -> None: ...


class Scheduler:
    """Owns the waiting and the running requests and their page tables."""

    def __init__(
        self,
        *,
        pool: PagePool,
        adapters: Adapters,
        prefixes: PrefixCache,
        page_size: int,
        max_running: int,
        max_adapters: int | None,
        max_step_tokens: int,
        max_skips: int,
    ) -> None:
        self._pool, self._adapters, self._page_size = pool, adapters, page_size
        self._prefixes = prefixes
        # Every running request must find room for its decode token in the step.
        self.max_running = min(max_running, max_step_tokens)
        self._max_adapters = max_adapters
        self._max_step_tokens, self._max_skips = max_step_tokens, max_skips
        self._in_use: Counter[str] = Counter()  # digest -> running requests
        self.waiting: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []  # likewise
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The request has ended: forget it and release what it holds."""
        if sequence.is_running:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)

    def wanted_adapters(self) -> Iterable[str]:
        """Digests that waiting requests need, the most urgent first."""
        return (digest for sequence in self.waiting for digest in sequence.digests)

    def schedule(self) -> Step:
        """Decide the next step: take its pages, preempt and admit as needed."""
        step = Step(budget=self._max_step_tokens)
        # Decodes first: a prompt's chunk must not delay those who are already answering.
        for is_decode in (True, False):
            for sequence in list(self.running):
                if not sequence.is_running:
                    continue  # preempted a moment ago
                if (sequence.num_uncomputed == 1) == is_decode and step.budget:
                    self._continue(step, sequence)
        self._admit(step)
        _group_by_adapter(step)
        return step

    def can_admit(self) -> bool:
        """Whether a waiting request might get into the next step."""
        return bool(self.waiting) and len(self.running) < self.max_running

    def look_ahead(self, rows: list[Row]) -> list[tuple[int, int, int]] | None:
        """Take the pages that decoding rows need for the step after the one that runs now.

        Returns (row, index in its page table, page) of each new page; None, with nothing taken,
        when they are neither free nor idle in the prefix cache.
        """
        short = [
            (i, row.sequence)
            for i, row in enumerate(rows)
            if self._pages_for(row.sequence.num_computed + 2) > len(row.sequence.page_table)
        ]
        self._prefixes.evict(len(short))
        if not self._pool.can_take(len(short)):
            return None
        pages = self._pool.take(len(short), PageUse.KV)
        for (_, sequence), page in zip(short, pages, strict=True):
            sequence.page_table.append(page)
        return [
            (i, len(sequence.page_table) - 1, page)
            for (i, sequence), page in zip(short, pages, strict=True)
        ]

    def commit(self, row: Row) -> None:
        """The step has run: the row's tokens are in the pages, and full pages can be shared."""
        sequence = row.sequence
        first = sequence.num_computed // self._page_size
        sequence.num_computed += row.num_tokens
        end = sequence.num_computed // self._page_size
        if end > first:
            keys = self._keys(sequence, end)
            for index in range(first, end):
                self._prefixes.add(keys[index], sequence.page_table[index])

    def check_integrity(self) -> None:
        """Raise AssertionError unless page tables, pins and orders agree."""
        for sequences in (self.waiting, self.running):
            arrivals = [sequence.arrival for sequence in sequences]
            assert arrivals == sorted(set(arrivals)), "requests out of order"
        for sequence in self.waiting:
            assert not sequence.page_table and sequence.num_computed == 0
        for sequence in self.running:
            capacity = len(sequence.page_table) * self._page_size
            assert sequence.num_computed <= capacity, "KV without a page"
            assert capacity - self._page_size < sequence.num_tokens, "a page too many"
            assert all(self._adapters.is_resident(digest) for digest in sequence.digests)
        assert self._in_use == Counter(d for s in self.running for d in s.digests)

    def _continue(self, step: Step, sequence: Sequence) -> None:
        num_tokens = min(sequence.num_uncomputed, step.budget)
        if self._make_room(step, sequence, num_tokens):
            self._run(step, sequence, num_tokens)

    def _admit(self, step: Step) -> None:
        for sequence in list(self.waiting):
            if not step.budget or len(self.running) >= self.max_running:
                return
            if sequence.is_waiting_for_grammar or _is_prompt_under_way(sequence):
                continue
            missing = [d for d in sequence.digests if not self._adapters.is_resident(d)]
            lacks_room = any(self._adapters.lacks_room(d) for d in missing)
            if lacks_room or self._has_too_many_adapters(sequence):
                sequence.num_skips += 1
                if sequence.num_skips > self._max_skips:
                    return  # nobody overtakes it any more, so room will come free
                continue
            if missing:
                continue
            cached = self._find_pages(sequence)
            # Room for the whole prompt, not just the chunk: else it would soon be preempted.
            num_pages = self._pages_for(sequence.num_tokens) - len(cached)
            self._adapters.evict_idle(num_pages, keep=sequence.digests)
            if not self._pool.can_take(num_pages):
                self._prefixes.release(cached)
                if self.running or self._adapters.is_loading:
                    return
                step.failed.append((sequence, _too_small(self._pool, num_pages)))
                continue
            self._start(sequence, cached)
            self._run(step, sequence, min(sequence.num_uncomputed, step.budget))

    def _find_pages(self, sequence: Sequence) -> list[int]:
        """The sequence's first pages, as far as somebody has computed them; now shared with it.

        A sibling has the prompt's full pages even where nothing is kept for strangers; what is in
        the prompt's last page besides is computed again, a page at most.
        """
        # One token at least is computed: what follows is sampled from it.
        num_full = (sequence.num_tokens - 1) // self._page_size
        pages = self._prefixes.take(self._keys(sequence, num_full))
        num_common = min(num_full, sequence.num_prompt // self._page_size)
        if len(pages) < num_common:
            owner = next((s for s in sequence.siblings if s.has_prompt), None)
            if owner is not None:
                self._prefixes.release(pages)
                pages = owner.page_table[:num_common].tolist()
                self._pool.share(pages)
        return pages

    def _run(self, step: Step, sequence: Sequence, num_tokens: int) -> None:
        """Put the row into the step; its pages can be taken."""
        num_new = self._pages_for(sequence.num_computed + num_tokens) - len(sequence.page_table)
        if num_new > 0:
            sequence.page_table.extend(self._pool.take(num_new, PageUse.KV))
        step.rows.append(Row(sequence, num_tokens))
        step.budget -= num_tokens

    def _has_too_many_adapters(self, sequence: Sequence) -> bool:
        if self._max_adapters is None:
            return False
        new = sum(digest not in self._in_use for digest in sequence.digests)
        return new > 0 and len(self._in_use) + new > self._max_adapters

    def _keys(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        """What the sequence's first pages, which are full, are known by."""
        if sequence.page_keys is None:
            tenant_id = sequence.request.tenant_id
            sequence.page_keys = PageKeys(tenant_id, sequence.adapter_key, self._page_size)
        return sequence.page_keys.first(num_pages, sequence.token_ids)

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        self.waiting.remove(sequence)
        _insert_by_arrival(self.running, sequence)
        sequence.is_running = True
        sequence.page_table = array("i", cached)
        sequence.num_computed = len(cached) * self._page_size
        if sequence.num_cached is None:  # else it returns, and finds pages of its own
            for sibling in sequence.siblings:
                sibling.num_cached = sequence.num_computed
        for digest in sequence.digests:
            self._adapters.pin(digest)
            self._in_use[digest] += 1

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.is_running = False
        self._prefixes.release(sequence.page_table)
        sequence.page_table = array("i")
        sequence.num_computed = 0
        for digest in sequence.digests:
            self._adapters.unpin(digest)
            self._in_use[digest] -= 1
            if not self._in_use[digest]:
                del self._in_use[digest]

    def _make_room(self, step: Step, sequence: Sequence, num_tokens: int) -> bool:
        """Free the pages that `num_tokens` more need; False when `sequence` must sit out."""
        num_new = self._pages_for(sequence.num_computed + num_tokens) - len(sequence.page_table)
        while not self._pool.can_take(num_new):
            self._adapters.evict_idle(num_new, keep=())
            if self._pool.can_take(num_new):
                break
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                if not self._adapters.is_loading:
                    step.failed.append((sequence, _too_small(self._pool, num_new)))
                return False
            self._preempt(step, victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, step: Step, victim: Sequence) -> None:
        for row in step.rows:
            if row.sequence is victim:
                step.rows.remove(row)
                step.budget += row.num_tokens
                break
        self._stop(victim)
        _insert_by_arrival(self.waiting, victim)
        self.num_preemptions += 1

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)


def _is_prompt_under_way(sequence: Sequence) -> bool:
    """Whether a sibling is computing the prompt, which it will then share."""
    running = [s for s in sequence.siblings if s.is_running]
    return bool(running) and not any(s.has_prompt for s in running)


def _insert_by_arrival(sequences: list[Sequence], sequence: Sequence) -> None:
    position = len(sequences)
    while position and sequences[position - 1].arrival > sequence.arrival:
        position -= 1
    sequences.insert(position, sequence)


def _group_by_adapter(step: Step) -> None:
    """Make rows of one adapter adjacent, so that its weights are read once per step."""
    first_seen: dict[AdapterKey, int] = {}
    for row in step.rows:
        first_seen.setdefault(row.sequence.adapter_key, len(first_seen))
    step.rows.sort(key=lambda row: first_seen[row.sequence.adapter_key])


def _too_small(pool: PagePool, num_pages: int) -> OutOfPages:
    return OutOfPages(
        f"the request alone needs {num_pages} pages more than there are; the arena has "
        f"{pool.num_pages}"
    )
