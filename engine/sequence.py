"""Sequence: one continuation in the engine; Step and Row: what a pass computes. No torch here."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

from engine.errors import EngineError
from engine.memory.prefix_cache import AdapterKey, PageKeys
from engine.request import Request, RequestOutput, TokenLogprob


class PromptLogprobs:
    """The log-probabilities of one prompt's tokens, as far as known; shared by the request's n.

    num_known  number of first positions for which the next token's log-probability is known
    num_top    alternatives kept for each
    """

    __slots__ = ("_entries", "_is_taken", "_num_wanted", "num_top")

    def __init__(self, num_prompt: int, num_top: int) -> None:
        self.num_top = num_top
        self._num_wanted = num_prompt - 1
        self._entries: list[TokenLogprob] = []
        self._is_taken = False

    @property
    def num_known(self) -> int:
        return len(self._entries)

    @property
    def is_complete(self) -> bool:
        return len(self._entries) >= self._num_wanted

    def add(self, first: int, entries: list[TokenLogprob]) -> None:
        """Add the entries of positions from `first` on; known ones stay as they are."""
        assert first <= self.num_known, "a position was left out"
        for entry in entries[self.num_known - first :]:
            top = entry.top[: self.num_top]
            self._entries.append(TokenLogprob(entry.token_id, entry.logprob, top, entry.rank))

    def take(self) -> list[TokenLogprob] | None:
        """Return all of them once; None before all are known, and after that one time."""
        if self._is_taken or not self.is_complete:
            return None
        self._is_taken = True
        return self._entries


class Sequence:
    """One continuation of a request's prompt: its tokens so far and the pages of their KV.

    A request has `n` of them. Compared and hashed by identity.

    index         which of the request's n
    siblings      all n, itself included
    token_ids     the prompt, then what was generated; ~i stands for token i of a step in flight
    num_computed  tokens whose KV is in the pages; the rest is still to be run
    page_table    page i holds tokens 16 i to 16 i + 15
    num_dropped   pages at its start that were given back, as nothing reads them any more; the
                  table has 0 for them
    state         pages to which its next step writes what gated delta nets keep of it
    state_before  pages that hold this now, perhaps the prefix cache's; empty: nothing is computed
    borders       numbers of tokens at which a step has to end, so that the prefix cache can keep
                  the state there
    num_cached    tokens of the prompt that the first sibling to start found in the prefix cache;
                  None: no sibling has started
    stop_ids      tokens that end it
    prompt_logprobs  those known so far; None: not asked for
    versions      registration numbers of its adapters, in order: the content of each digest
    has_left      whether it has given back its pages; its last token may still be in flight
    is_assumed    whether some of its tokens are drafts that may be wrong; not admitted until known
    num_skips     how often it was overtaken by a sequence of its class
    num_drafted   tokens that were drafted for it so far
    accepted      those that were right, by source
    drafting      what engine.drafts keeps of it; None: nothing was drafted yet
    """

    __slots__ = (
        "accepted",
        "adapter_key",
        "arrival",
        "borders",
        "digests",
        "drafting",
        "has_ended",
        "has_left",
        "index",
        "is_assumed",
        "is_running",
        "is_waiting_for_grammar",
        "num_cached",
        "num_computed",
        "num_drafted",
        "num_dropped",
        "num_prompt",
        "num_skips",
        "overdue_at",
        "page_keys",
        "page_table",
        "patience",
        "prompt_logprobs",
        "rank",
        "request",
        "siblings",
        "state",
        "state_before",
        "stop_ids",
        "token_ids",
        "versions",
    )

    def __init__(
        self,
        request: Request,
        arrival: int,
        stop_ids: frozenset[int] = frozenset(),
        index: int = 0,
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.stop_ids = stop_ids
        self.index = index
        self.siblings: list[Sequence] = [self]
        self.token_ids = list(request.token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.num_cached: int | None = None
        self.page_keys: PageKeys | None = None  # the scheduler's, which knows the page size
        self.page_table = array("i")
        self.num_dropped = 0
        self.state = array("q")
        self.state_before = array("q")
        self.borders: set[int] = set()
        self.adapter_key: AdapterKey = tuple((p.digest, p.weight) for p in request.adapters)
        self.digests = tuple(part.digest for part in request.adapters)
        self.versions: tuple[int, ...] = ()
        self.prompt_logprobs: PromptLogprobs | None = None
        self.is_running = False
        self.has_ended = False
        self.has_left = False
        self.is_assumed = False
        self.is_waiting_for_grammar = False
        self.num_skips = 0
        self.num_drafted = 0
        self.accepted: dict[str, int] = {}
        self.drafting: Any = None
        # Set by the waiting queue: the rank, and how long it may wait for later arrivals.
        self.rank: tuple[int, int] = (0, arrival)
        self.patience: float | None = None
        self.overdue_at = math.inf

    @classmethod
    def of(
        cls, request: Request, arrival: int, stop_ids: frozenset[int] = frozenset()
    ) -> list[Sequence]:
        """Make the request's n sequences, with arrival numbers from `arrival` on."""
        siblings = [cls(request, arrival + i, stop_ids, i) for i in range(request.n)]
        num_top, wanted = request.sampling.prompt_logprobs, None
        if num_top is not None:
            wanted = PromptLogprobs(len(request.token_ids), num_top)
        for sequence in siblings:
            sequence.siblings = siblings
            sequence.prompt_logprobs = wanted
        return siblings

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def pages(self) -> array[int]:
        """The pages that it holds of keys and values."""
        return self.page_table[self.num_dropped :]

    @property
    def state_pages(self) -> array[int]:
        """The pages that it holds of states."""
        is_same = self.state_before is self.state
        return self.state if is_same else self.state + self.state_before

    @property
    def has_new_state(self) -> bool:
        """Return whether its next step reads its state from other pages than it writes to."""
        return bool(self.state) and self.state_before is not self.state

    @property
    def seed(self) -> int | None:
        """Its random seed: sequence i of a request has the request's seed + i."""
        seed = self.request.sampling.seed
        return None if seed is None else int(seed) + self.index

    def output(self) -> RequestOutput:
        """Make an output without tokens; its counts are `count`'s."""
        return RequestOutput(
            request_id=self.request.request_id,
            index=self.index,
            num_prompt_tokens=self.num_prompt,
            num_cached_tokens=self.num_cached or 0,
        )

    def count(self, output: RequestOutput) -> None:
        """Note in an output what the sequence has generated so far."""
        if self.request.sampling.max_tokens != 0:
            output.num_generated = len(self.token_ids) - self.num_prompt
        if self.num_drafted:
            output.accepted_drafts = self.accepted.copy()
            output.num_rejected_drafts = self.num_drafted - sum(self.accepted.values())

    @property
    def has_prompt(self) -> bool:
        """Return whether the KV of the whole prompt is in its pages."""
        return self.is_running and self.num_computed >= self.num_prompt


@dataclass(slots=True)
class Row:
    """One sequence's share of a step: its next `num_tokens` tokens.

    drafts  guesses of the tokens that follow its last one; `num_tokens` counts them too
    sources of each draft, where it comes from
    certain of each draft, whether it needs no logits: the grammar allows no other token there
    is_ahead  whether the next step may be launched before it is known which drafts are right; if
            one is wrong, the sequence's row in that step is void
    num_sure  of the first drafts, how many are right if the token before them is what it was taken
            for
    """

    sequence: Sequence
    num_tokens: int
    drafts: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    certain: tuple[bool, ...] = ()
    is_ahead: bool = False
    num_sure: int = 0

    @property
    def num_wanted(self) -> int:
        """Logits that the row wants if it samples: of its last token and of its drafts."""
        return 1 + len(self.drafts) - sum(self.certain)

    @property
    def num_known(self) -> int:
        """Its tokens that are not drafts."""
        return self.num_tokens - len(self.drafts)

    @property
    def is_certain(self) -> bool:
        """Return whether all of its drafts are certain: then they are as good as known tokens."""
        return all(self.certain)

    @property
    def wanted(self) -> list[int]:
        """Of each of these logits, how many drafts stand before it."""
        return [i for i, is_certain in enumerate((*self.certain, False)) if not is_certain]

    def cut(self, num_drafts: int) -> None:
        """Keep only the first drafts."""
        self.num_tokens -= len(self.drafts) - num_drafts
        self.drafts, self.sources = self.drafts[:num_drafts], self.sources[:num_drafts]
        self.certain = self.certain[:num_drafts]
        self.num_sure = min(self.num_sure, num_drafts)

    @property
    def samples(self) -> bool:
        """Return whether the step computes the sequence's last token, so that a new one follows."""
        sequence = self.sequence  # asked several times of every row in a step, so without helpers
        num_known = self.num_tokens - len(self.drafts)
        return num_known == len(sequence.token_ids) - sequence.num_computed

    @property
    def scored(self) -> range:
        """Positions whose rows give a prompt log-probability that is not known yet."""
        wanted, first = self.sequence.prompt_logprobs, self.sequence.num_computed
        if wanted is None:
            return range(0)
        last = min(first + self.num_tokens, self.sequence.num_prompt - 1)
        return range(max(first, wanted.num_known), last)


@dataclass(slots=True)
class Step:
    """The work of one forward pass; rows of one adapter key are adjacent.

    budget     tokens that may still be added
    failed     sequences that cannot run, with the reason; the scheduler still owns them
    sampling   sequences that get a token, in the order of the rows; set by the launch
    new_pages  (row, index in its page table, page) of each new page, for a step that replays the
               one before, one token further; None for any other step
    has_drafts whether any row has
    keeps_states  whether what the LM head reads is wanted, for the drafts of the next step
    proposals  of its rows: (row, engine.drafts' `Proposal`), until it was learned what was right
    """

    budget: int
    rows: list[Row] = field(default_factory=list)
    failed: list[tuple[Sequence, EngineError]] = field(default_factory=list)
    sampling: list[Sequence] = field(default_factory=list)
    new_pages: list[tuple[int, int, int]] | None = None
    has_drafts: bool = False
    keeps_states: bool = False
    proposals: list[tuple[Row, Any]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    def group_by_adapter(self) -> None:
        """Make rows of one adapter adjacent, so that its weights are read once."""
        first_seen: dict[AdapterKey, int] = {}
        for row in self.rows:
            first_seen.setdefault(row.sequence.adapter_key, len(first_seen))
        self.rows.sort(key=lambda row: first_seen[row.sequence.adapter_key])
