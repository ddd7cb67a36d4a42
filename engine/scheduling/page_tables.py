"""PageTables: which pages hold a sequence's KV. No torch here."""

from __future__ import annotations

from array import array

from engine.memory.page_pool import PagePool, PageUse
from engine.memory.prefix_cache import PageKeys, PrefixCache
from engine.sequence import Row, Sequence

#: States for which a sequence needs room at most: one that it found, and its own.
STATES_HELD = 2


class PageTables:
    """Fills and empties the page tables of sequences; gives full pages to the prefix cache.

    page_size  tokens per page
    num_state  pages of what gated delta nets keep of a sequence; 0: the model has none
    window     how far back from a new token, itself included, KV may be read; pages further back
               are given back while the sequence runs. None: all KV is read
    """

    def __init__(
        self,
        pool: PagePool,
        prefixes: PrefixCache,
        page_size: int,
        window: int | None = None,
        num_state: int = 0,
    ) -> None:
        self._pool, self._prefixes, self._page_size = pool, prefixes, page_size
        self._window, self._num_state = window, num_state
        self._num_drafts: dict[Sequence, int] = {}  # that a step in flight has pages for
        # The first full page that was not offered for sharing: it has drafts that may be wrong.
        self._unoffered: dict[Sequence, int] = {}

    def count_for(self, num_tokens: int) -> int:
        """Return the number of pages that `num_tokens` tokens fill."""
        return -(-num_tokens // self._page_size)

    @property
    def gives_back(self) -> bool:
        """Return whether a running sequence loses pages that nothing reads any more."""
        return self._window is not None

    def most_held(self, num_tokens: int) -> int:
        """Return how many pages are always enough to run a sequence of `num_tokens` tokens.

        All its pages; with a window, those that a chunk of one page writes and those that its first
        token reads.
        """
        num_pages = self.count_for(num_tokens)
        if self._window is None:
            return num_pages + STATES_HELD * self._num_state
        return min(num_pages, (self._window - 1 + self._page_size - 2) // self._page_size + 2)

    def count_to_start(self, sequence: Sequence, found: list[int]) -> int:
        """Return how many pages have to be free before it starts behind its found pages.

        Enough for all its tokens, not just a chunk: else it would soon be preempted. With a window,
        enough for the most that it holds at a time.
        """
        num_new = self.count_for(sequence.num_tokens) - len(found)
        if self._window is None:
            return num_new + self._num_state
        num_held = len(found) - self._first_seen(len(found) * self._page_size)
        return min(num_new, self.most_held(sequence.num_tokens) - num_held)

    def count_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many more pages its next `num_tokens` tokens need."""
        end = sequence.num_computed + num_tokens
        return -(-end // self._page_size) - len(sequence.page_table)

    def find(self, sequence: Sequence) -> list[int]:
        """Find and share the sequence's first pages, as far as they are computed.

        Where there are states, as far as one is kept.

        Pages that its next token does not see are 0 and not shared. A sibling has the prompt's full
        pages even if the prefix cache is off; tokens in the prompt's last, partly
        filled page are computed again.
        """
        # One token at least is computed: what follows is sampled from it.
        num_full = (sequence.num_tokens - 1) // self._page_size
        wanted = sequence.prompt_logprobs
        if wanted is not None and not wanted.is_complete:
            # Positions whose log-probabilities are not known yet must be computed.
            num_full = min(num_full, wanted.num_known // self._page_size)
        pages = self._prefixes.take(self._keys(sequence, num_full))
        if self._num_state:
            sequence.state_before = self._prefixes.take_state(pages)
            return pages
        num_common = min(num_full, sequence.num_prompt // self._page_size)
        if len(pages) < num_common:
            first = self._first_seen(num_common * self._page_size)
            owners = (s for s in sequence.siblings if s.has_prompt and s.num_dropped <= first)
            owner = next(owners, None)
            if owner is not None:
                self._prefixes.release(pages)
                pages = [0] * first + owner.page_table[first:num_common].tolist()
                self._pool.share(pages[first:])
                return pages
        first = self._first_seen(len(pages) * self._page_size)
        self._prefixes.release(pages[:first])
        return [0] * first + pages[first:]

    def give_back(self, sequence: Sequence, pages: list[int]) -> None:
        """Undo `find`."""
        self._prefixes.release(sequence.state_before)
        sequence.state_before = array("q")
        self._prefixes.release(pages[self._first_seen(len(pages) * self._page_size) :])

    def start(self, sequence: Sequence, pages: list[int]) -> None:
        """Start the sequence behind the pages that were found for it."""
        sequence.page_table = array("i", pages)
        sequence.num_computed = len(pages) * self._page_size
        sequence.num_dropped = self._first_seen(sequence.num_computed)
        if self._num_state:
            self._start_state(sequence)
        if sequence.num_cached is None:  # else it returns, and finds pages of its own
            for sibling in sequence.siblings:
                sibling.num_cached = sequence.num_computed

    def _start_state(self, sequence: Sequence) -> None:
        """Take room for the sequence's own state.

        Its steps will end where a state is worth keeping: at the last full pages of its prompt, and
        where it leaves a prefix that is known but has no state.
        """
        sequence.state = self._take_state()
        if self._prefixes.is_enabled:
            num_full = (sequence.num_tokens - 1) // self._page_size
            known = self._prefixes.count_known(self._keys(sequence, num_full))
            ends = (sequence.num_prompt - i for i in range(2))
            sequence.borders = {
                n * self._page_size for n in (known, *(e // self._page_size for e in ends))
            }

    def _take_state(self) -> array[int]:
        return array("q", self._pool.take(self._num_state, PageUse.KV))

    def cut(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of its next `num_tokens` tokens come before or at the next border."""
        first = sequence.num_computed
        ends = [end - first for end in sequence.borders if first < end < first + num_tokens]
        return min(ends, default=num_tokens)

    def extend(self, sequence: Sequence, num_tokens: int) -> None:
        """Take the pages that its next `num_tokens` tokens need."""
        num_new = self.count_missing(sequence, num_tokens)
        if num_new > 0:
            sequence.page_table.extend(self._pool.take(num_new, PageUse.KV))

    def clear(self, sequence: Sequence) -> None:
        """Release the pages of a sequence that runs no longer."""
        self._prefixes.release(sequence.pages)
        self._prefixes.release(sequence.state_pages)
        sequence.state = sequence.state_before = array("q")
        sequence.page_table = array("i")
        sequence.num_computed = sequence.num_dropped = 0
        self._num_drafts.pop(sequence, None)
        self._unoffered.pop(sequence, None)

    def commit(self, row: Row) -> None:
        """Note that the row's tokens are in the pages; offer full pages for sharing.

        Its drafts, if it has any, are among its tokens now. A page with drafts that may be wrong
        is offered by a later commit; until then `rewind` may follow.
        """
        sequence = row.sequence
        first = sequence.num_computed // self._page_size
        sequence.num_computed += row.num_tokens
        num_sure = sequence.num_computed
        if row.drafts or self._unoffered:
            first, num_sure = self._keep_unsure(row, first)
        end = num_sure // self._page_size
        if end > first:
            keys = self._keys(sequence, end)
            for index in range(first, end):
                self._prefixes.add(keys[index], sequence.page_table[index])
        if self._window is not None:
            self._drop(sequence, num_sure)
        if self._num_state:
            self._commit_state(sequence)

    def _commit_state(self, sequence: Sequence) -> None:
        """Note that the state was written; at a border, let the prefix cache keep it if it can.

        Then the sequence's next step reads it there, and writes to pages of its own. So no state is
        copied.
        """
        if sequence.state_before is not sequence.state:
            self._prefixes.release(sequence.state_before)
            sequence.state_before = sequence.state
        if sequence.num_computed not in sequence.borders or not sequence.num_computed:
            return
        num_pages = sequence.num_computed // self._page_size
        key, page = self._keys(sequence, num_pages)[-1], sequence.page_table[num_pages - 1]
        self._prefixes.evict(self._num_state)
        if not self._pool.can_take(self._num_state):
            return
        if self._prefixes.keep_state(key, page, sequence.state):
            sequence.state = self._take_state()

    def _keep_unsure(self, row: Row, first: int) -> tuple[int, int]:
        """Keep in mind which pages are not offered yet. -> the first to be, and the sure tokens."""
        sequence = row.sequence
        if row.drafts:
            self._num_drafts.pop(sequence, None)
        num_sure = sequence.num_computed - (len(row.drafts) - row.num_sure)
        first = self._unoffered.pop(sequence, first)
        end = num_sure // self._page_size
        if sequence.num_computed // self._page_size > end:
            self._unoffered[sequence] = max(first, end)
        return first, num_sure

    def rewind(self, sequence: Sequence) -> None:
        """Note that drafts which were committed are wrong: only its tokens are, but the last."""
        known = sequence.num_tokens - 1
        sequence.num_computed = min(sequence.num_computed, known)
        if sequence.page_keys is not None:
            sequence.page_keys.forget(known // self._page_size)
        if sequence.is_running:
            self.trim(sequence)

    def _first_seen(self, num_computed: int) -> int:
        """Return the first page that the token after `num_computed`, or a later one, attends to."""
        if self._window is None:
            return 0
        return max(num_computed + 1 - self._window, 0) // self._page_size

    def _drop(self, sequence: Sequence, num_sure: int) -> None:
        """Give back the pages to which no token behind its first `num_sure` attends any more."""
        first = self._first_seen(num_sure)
        if first > sequence.num_dropped:
            self._prefixes.release(sequence.page_table[sequence.num_dropped : first])
            for index in range(sequence.num_dropped, first):
                sequence.page_table[index] = 0
            sequence.num_dropped = first

    def reserve_next_pages(self, rows: list[Row]) -> list[tuple[int, int, int]] | None:
        """Take the pages that decoding rows need for their next step.

        Returns (row, index in its page table, page) of each new page; None, with nothing taken,
        when they are neither free nor idle in the prefix cache.
        """
        short = [
            (i, row.sequence)
            for i, row in enumerate(rows)
            if self.count_for(row.sequence.num_computed + 1) > len(row.sequence.page_table)
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

    def reserve_drafts(self, row: Row, num_drafts: int) -> int:
        """Take pages for `num_drafts` tokens after a row's own; return for how many there is room.

        Only pages that are free or idle in the prefix cache: drafts never displace anything.
        """
        sequence = row.sequence
        num_new = self.count_missing(sequence, row.num_tokens + num_drafts)
        if num_new > 0:
            self._prefixes.evict(num_new)
            if self._pool.can_take(num_new):
                sequence.page_table.extend(self._pool.take(num_new, PageUse.KV))
        room = len(sequence.page_table) * self._page_size - sequence.num_computed
        num_drafts = min(num_drafts, room - row.num_tokens)
        self._num_drafts[sequence] = num_drafts
        return num_drafts

    def trim(self, sequence: Sequence) -> None:
        """Give back the pages that were taken for drafts which turned out to be wrong."""
        self._num_drafts.pop(sequence, None)
        needed = self.count_for(sequence.num_tokens)
        if len(sequence.page_table) > needed:
            self._prefixes.release(sequence.page_table[needed:])
            del sequence.page_table[needed:]

    def check_integrity(self, sequence: Sequence) -> None:
        """Raise AssertionError unless a running sequence's table fits its tokens."""
        capacity = len(sequence.page_table) * self._page_size
        assert sequence.num_computed <= capacity, "KV without a page"
        num_tokens = sequence.num_tokens + self._num_drafts.get(sequence, 0)
        assert capacity - self._page_size < num_tokens, "a page too many"
        dropped = sequence.num_dropped * self._page_size
        assert not dropped or self._window is not None, "a page was given back that is read"
        assert dropped <= max(sequence.num_computed + 1 - (self._window or 0), 0)

    def _keys(self, sequence: Sequence, num_pages: int) -> list[bytes]:
        """Return the prefix cache's keys of the sequence's first full pages."""
        if sequence.page_keys is None:
            tenant_id = sequence.request.tenant_id
            sequence.page_keys = PageKeys(
                tenant_id, sequence.adapter_key, self._page_size, sequence.versions
            )
        return sequence.page_keys.first(num_pages, sequence.token_ids)
