"""PrefixCache: finds pages of KV by their tokens, tenant and adapters.

A full page's key is a hash chained from the keys before it, so that equal keys mean equal tokens
from the first one on. The chain starts from the tenant and the ordered adapters with their
weights: pages of another tenant, adapter or blend are never found. Source: vLLM's automatic prefix
caching (arXiv:2309.06180). No torch here.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

from engine.memory.page_pool import PagePool

AdapterKey = tuple[tuple[str, float], ...]


class PageKeys:
    """Computes the keys of one sequence's full pages when they are first asked for.

    page_size  tokens per page
    versions   of the adapters, in their order, where a digest may come to stand for other content
    """

    __slots__ = ("_keys", "_page_size", "_root")

    def __init__(
        self,
        tenant_id: str,
        adapter_key: AdapterKey,
        page_size: int,
        versions: Sequence[int] = (),
    ) -> None:
        parts = [[digest, float(weight).hex()] for digest, weight in adapter_key]
        identity = [tenant_id, parts, list(versions)]
        self._root = hashlib.sha256(json.dumps(identity).encode()).digest()
        self._page_size = page_size
        self._keys: list[bytes] = []

    def first(self, num_pages: int, token_ids: Sequence[int]) -> list[bytes]:
        """Return the keys of the first `num_pages` pages, which `token_ids` fill."""
        while len(self._keys) < num_pages:
            start = len(self._keys) * self._page_size
            tokens = array("q", token_ids[start : start + self._page_size])
            assert len(tokens) == self._page_size, "the page is not full"
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return self._keys[:num_pages]

    def forget(self, num_pages: int) -> None:
        """Forget the keys of all pages but the first `num_pages`: their tokens may change."""
        del self._keys[num_pages:]


class PrefixCache:
    """Owns one reference to every page that it can find again.

    With a page it may keep the state of gated delta nets behind the page's tokens, which lies in
    pages of its own: it is evicted with the page or before it. Where there are states, a prefix
    ends with one.

    A page that only the cache refers to is *idle*; `evict` frees idle pages, the least recently
    used first. Pages that requests read are shared with them and stay.

    is_enabled  False: the cache keeps and finds nothing
    has_states  whether the model has states
    """

    def __init__(
        self, pool: PagePool, *, is_enabled: bool = True, has_states: bool = False
    ) -> None:
        self._pool, self.is_enabled, self._has_states = pool, is_enabled, has_states
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._state_of: dict[int, array[int]] = {}  # page -> pages of the state behind it
        self._page_before: dict[int, int] = {}  # the first of these -> page
        # page, or first page of a state -> when it was last used, by the pool's time; least
        # recently used first
        self._idle: OrderedDict[int, int] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Return the number of pages that `evict` could free."""
        states = (
            self._state_of[self._page_before[i]] for i in self._page_before if i in self._idle
        )
        return len(self._idle) + sum(len(state) - 1 for state in states)

    @property
    def oldest_use(self) -> int | None:
        """Return the last use of the page that `evict` would free first; None when none is idle."""
        return next(iter(self._idle.values()), None)

    def take(self, keys: Sequence[bytes]) -> list[int]:
        """Share the pages of the longest known prefix of `keys` with the caller."""
        pages = [self._page_of[key] for key in keys[: self.count_known(keys)]]
        while self._has_states and pages and pages[-1] not in self._state_of:
            pages.pop()
        self._pool.share(pages)
        for page in pages:
            self._idle.pop(page, None)
        return pages

    def count_known(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first keys have a page."""
        return next((i for i, key in enumerate(keys) if key not in self._page_of), len(keys))

    def take_state(self, pages: Sequence[int]) -> array[int]:
        """Share the state behind these pages, which were taken, with the caller; empty: none is."""
        state = self._state_of.get(pages[-1]) if pages else None
        if state is None:
            return array("q")
        self._pool.share(state)
        for page in state[:1]:
            self._idle.pop(page, None)
        return state

    def keep_state(self, key: bytes, page: int, state: array[int]) -> bool:
        """Keep the state behind the caller's full page, and the page, unless a state is known.

        Who reads the state has the page, too: so an idle page's state is idle.
        """
        known = self._page_of.get(key)
        if known in self._state_of:
            return False
        if known is not None and known != page:
            self._idle.pop(known, None)
            del self._page_of[self._key_of.pop(known)]
            self._pool.release((known,))
        self.add(key, page)
        self._pool.share(state)
        self._state_of[page], self._page_before[state[0]] = state, page
        return True

    def add(self, key: bytes, page: int) -> None:
        """Keep the caller's full page, unless a page with the same KV is known."""
        if self.is_enabled and key not in self._page_of:
            self._pool.share((page,))
            self._page_of[key], self._key_of[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Drop the caller's references to the pages of one table; known pages become idle.

        The last pages of a prefix are evicted before the first ones, without which they cannot be
        found.
        """
        self._pool.release(pages)
        for page in reversed(pages):
            is_known = page in self._key_of or page in self._page_before
            if is_known and self._pool.num_references(page) == 1:
                self._idle[page] = self._pool.time

    def evict(self, num_pages: int) -> None:
        """Free idle pages until `num_pages` pages can be taken or none is idle."""
        while self._idle and not self._pool.can_take(num_pages):
            self.evict_oldest()

    def evict_oldest(self) -> None:
        """Free the least recently used idle page; there must be one."""
        self.evict_page(next(iter(self._idle)))

    def is_idle(self, page: int) -> bool:
        """Return whether `evict_page` may free this page."""
        return page in self._idle

    def evict_page(self, page: int) -> None:
        """Free an idle page or state; what is behind it in its prefix is not found any more."""
        del self._idle[page]
        if page in self._page_before:
            self._pool.release(self._state_of.pop(self._page_before.pop(page)))
            return
        if page in self._state_of:
            self.evict_page(self._state_of[page][0])
        del self._page_of[self._key_of.pop(page)]
        self._pool.release((page,))

    def owned_pages(self) -> list[int]:
        """Return the cache's references, for `PagePool.check_integrity`."""
        return [*self._key_of, *chain.from_iterable(self._state_of.values())]

    def check_integrity(self) -> None:
        """Raise AssertionError unless keys, pages and references agree."""
        assert self._page_of == {key: page for page, key in self._key_of.items()}
        assert self._state_of.keys() <= self._key_of.keys()
        assert self._page_before == {state[0]: page for page, state in self._state_of.items()}
        known = (*self._key_of, *self._page_before)
        idle = {page for page in known if self._pool.num_references(page) == 1}
        assert idle == self._idle.keys(), "a page is idle and read, or neither"
