"""PinnedPrefixes: prefixes that stay in the arena, such as an adapter's system prompt.

A pin holds a reference to every page of its prefix, like a request that never ends: the pages are
not idle, so they are not evicted, and the prefix cache finds them for requests with the same
tenant, adapters and tokens. Missing pages are computed by an internal request of batch priority. It
waits while pages are scarce, and is tried again after a failure.

A *kept* prefix is pinned as a lease: it yields to a request that has no room beside it, and of the
pages for pins one tenant's get half at most. No torch here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.errors import EngineError, PinLimitExceeded, RequestError
from engine.memory.pin_choice import choose_pins
from engine.memory.prefix_cache import PageKeys, PrefixCache
from engine.request import (
    AdapterPart,
    KeptPrefix,
    Priority,
    Request,
    RequestOutput,
    SamplingParams,
)

log = logging.getLogger(__name__)

_OWN = "\0pin "  # begins with NUL, as no caller's id does
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0


@dataclass(slots=True)
class _Pin:
    """One pinned prefix.

    request   computes the prefix
    keys      of its pages; the last of them identifies the pin
    pages     those that the pin holds
    state     those of the state behind them
    is_kept   a lease, which `keep` made
    retry_at  not computed again before this time
    """

    request: Request
    keys: list[bytes]
    pages: list[int] = field(default_factory=list)
    state: list[int] = field(default_factory=list)
    is_kept: bool = False
    is_computing: bool = False
    retry_s: float = _FIRST_RETRY_S
    retry_at: float = float("-inf")

    @property
    def held(self) -> list[int]:
        return self.pages + self.state

    @property
    def is_warm(self) -> bool:
        return len(self.pages) == len(self.keys)


class _Hashed(NamedTuple):
    """A kept prefix with the keys of its full pages, for these versions of its adapters."""

    prefix: KeptPrefix
    versions: tuple[int, ...]
    keys: list[bytes]


class PinnedPrefixes:
    """Owns the pins and their references to pages.

    max_pages  of all pins together; a page that several pins share counts for each
    versions   of adapters, as in `PageKeys`
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        page_size: int,
        max_pages: int,
        versions: Callable[[Iterable[str]], tuple[int, ...]],
    ) -> None:
        self._prefixes, self._page_size, self._max_pages = prefixes, page_size, max_pages
        self._versions = versions
        self._pins: dict[bytes, _Pin] = {}  # by the last key
        self._known: dict[str, _Hashed] = {}  # from the last `keep`
        self._kept: dict[str, bytes | None] = {}  # name -> last key; None: it fills no page
        self._computing: dict[str, _Pin] = {}  # by request id
        self._num_made = 0

    def request_for(
        self, tenant_id: str, adapters: tuple[AdapterPart, ...], token_ids: Sequence[int]
    ) -> Request:
        """Make the request that computes the prefix's full pages; RequestError if it has none."""
        if not self._prefixes.is_enabled:
            raise RequestError("nothing can be pinned without a prefix cache", param="token_ids")
        num_tokens = len(token_ids) // self._page_size * self._page_size
        if not num_tokens:
            raise RequestError(
                f"{len(token_ids)} tokens are less than a page of {self._page_size}, the least "
                "that can be pinned",
                param="token_ids",
            )
        self._num_made += 1
        return Request(
            request_id=f"{_OWN}{self._num_made}",
            token_ids=list(token_ids[:num_tokens]),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            adapters=adapters,
            tenant_id=tenant_id,
            priority=Priority.BATCH,
        )

    def add(self, request: Request) -> None:
        """Pin what the request computes, unless it is pinned already.

        Raises PinLimitExceeded.
        """
        keys = self._keys(request)
        if known := self._pins.get(keys[-1]):
            known.is_kept = False
            return
        num_pages = sum(len(pin.keys) for pin in self._pins.values())
        if num_pages + len(keys) > self._max_pages:
            raise PinLimitExceeded(
                f"the prefix has {len(keys)} pages; {num_pages} of the {self._max_pages} that may "
                "be pinned are taken",
                param="token_ids",
            )
        pin = _Pin(request, keys)
        self._pins[keys[-1]] = pin
        self._take(pin)

    def keep(self, wanted: Sequence[KeptPrefix]) -> None:
        """Pin these as leases, and no others; if they need too many pages, `choose_pins` chooses.

        Those that cannot be pinned, such as ones with too many tokens, are passed over.
        """
        by_name = {prefix.name: prefix for prefix in wanted}
        self._known = {name: self._hashed(prefix) for name, prefix in by_name.items()}
        keys = {name: hashed.keys for name, hashed in self._known.items() if hashed.keys}
        self._kept = {name: None for name in by_name if name not in keys}
        lasting = sum(len(pin.keys) for pin in self._lasting)
        chosen = choose_pins(
            [(by_name[name].tenant_id, name) for name in keys],
            {name: len(of_name) for name, of_name in keys.items()},
            self._max_pages - lasting,
        )
        self._kept |= {name: keys[name][-1] for name in chosen}
        for key, pin in list(self._pins.items()):
            if pin.is_kept and key not in self._kept.values():
                self._drop(key)
        for name in chosen:
            if keys[name][-1] not in self._pins:
                own = by_name[name]
                request = self.request_for(own.tenant_id, own.adapters, own.token_ids)
                self._pins[keys[name][-1]] = pin = _Pin(request, keys[name], is_kept=True)
                self._take(pin)

    def _hashed(self, prefix: KeptPrefix) -> _Hashed:
        """Return the prefix's keys, those of the last call if it has not changed: it is long."""
        versions = self._versions(part.digest for part in prefix.adapters)
        known = self._known.get(prefix.name)
        if known is not None and (known.prefix, known.versions) == (prefix, versions):
            return known
        is_any = self._prefixes.is_enabled and len(prefix.token_ids) >= self._page_size
        own = prefix.tenant_id, prefix.adapters, prefix.token_ids
        return _Hashed(prefix, versions, self._keys(self.request_for(*own)) if is_any else [])

    @property
    def kept_names(self) -> tuple[str, ...]:
        """The names of kept prefixes that are computed, or so short that they fill no page."""

        def is_warm(key: bytes | None) -> bool:
            return key is None or (key in self._pins and self._pins[key].is_warm)

        return tuple(name for name, key in self._kept.items() if is_warm(key))

    def let_go(self, let_others_go: Callable[[], bool]) -> bool:
        """Unpin kept prefixes, for a request that has no room beside them, and let others go.

        Returns whether either may give room.
        """
        kept = [key for key, pin in self._pins.items() if pin.is_kept]
        num_pages = sum(len(self._pins[key].pages) for key in kept)
        for key in kept:
            self._drop(key)
        if num_pages:
            log.warning("kept prefixes are let go for a request that needs their room")
        return let_others_go() or num_pages > 0

    def remove(self, request: Request) -> None:
        """Unpin what the request computes; do nothing if it is not pinned."""
        self._drop(self._keys(request)[-1])

    def _drop(self, key: bytes) -> None:
        pin = self._pins.pop(key, None)
        if pin is not None:
            self._prefixes.release(pin.held)
            pin.pages = pin.state = []

    def forget_adapter(self, digest: str) -> None:
        """Unpin the prefixes of an adapter, and of blends that it is part of."""
        for key, pin in list(self._pins.items()):
            if any(part.digest == digest for part in pin.request.adapters):
                self._drop(key)

    def due(self, now: float, check: Callable[[Request], None]) -> list[Request]:
        """Return the requests that the caller is to start now.

        check  raises EngineError if a request cannot be accepted now
        """
        due = []
        for pin in self._pins.values():
            if pin.is_warm or pin.is_computing or pin.retry_at > now:
                continue
            pin.is_computing = True
            self._computing[pin.request.request_id] = pin
            try:
                check(pin.request)
            except EngineError as error:
                log.warning("a prefix cannot be computed now", extra={"error": str(error)})
                self._postpone(pin.request.request_id, now)
            else:
                due.append(pin.request)
        return due

    def orphans(self) -> list[str]:
        """Return the ids of running requests whose pins are gone."""
        return [
            request_id
            for request_id, pin in self._computing.items()
            if self._pins.get(pin.keys[-1]) is not pin
        ]

    def note_end(self, request_id: str, now: float) -> None:
        """Note that a request has ended; if it computed a pin, hold its pages from now on."""
        pin = self._computing.get(request_id)
        if pin is not None:
            self._postpone(request_id, now)
            if self._pins.get(pin.keys[-1]) is pin:
                self._take(pin)

    def without_own(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Leave out the outputs of internal requests."""
        return [output for output in outputs if not output.request_id.startswith(_OWN)]

    @property
    def num_pages(self) -> int:
        """Return the number of pages that are held now; each counts once."""
        return len({page for pin in self._pins.values() for page in pin.held})

    @property
    def num_lasting_pages(self) -> int:
        """Return the same without pages that are held only for kept prefixes."""
        return len({page for pin in self._lasting for page in pin.held})

    @property
    def _lasting(self) -> list[_Pin]:
        return [pin for pin in self._pins.values() if not pin.is_kept]

    def num_shared(self, request: Request) -> int:
        """Return how many of the `num_lasting_pages` the request would find."""
        pinned = {key for pin in self._lasting for key in pin.keys[: len(pin.pages)]}
        num_full = (len(request.token_ids) - 1) // self._page_size
        keys = self._keys(request, num_full)
        return next((i for i, key in enumerate(keys) if key not in pinned), num_full)

    def owned_pages(self) -> list[list[int]]:
        """Return the pins' references, for `PagePool.check_integrity`."""
        return [pin.held for pin in self._pins.values()]

    def check_integrity(self) -> None:
        """Raise AssertionError unless pins, limits and requests under way agree."""
        assert sum(len(pin.keys) for pin in self._pins.values()) <= self._max_pages
        for key, pin in self._pins.items():
            assert key == pin.keys[-1] and len(pin.pages) <= len(pin.keys)
            assert pin.is_kept <= (key in self._kept.values())
            assert pin.is_computing == (pin.request.request_id in self._computing)

    def _postpone(self, request_id: str, now: float) -> None:
        """Try again later, as the request has ended or could not start."""
        pin = self._computing.pop(request_id)
        pin.is_computing = False
        pin.retry_at, pin.retry_s = now + pin.retry_s, min(2 * pin.retry_s, _LAST_RETRY_S)

    def _take(self, pin: _Pin) -> None:
        before, pin.pages = pin.held, self._prefixes.take(pin.keys)
        pin.state = list(self._prefixes.take_state(pin.pages))
        self._prefixes.release(before)

    def _keys(self, request: Request, num_pages: int | None = None) -> list[bytes]:
        adapter_key = tuple((part.digest, part.weight) for part in request.adapters)
        versions = self._versions(part.digest for part in request.adapters)
        keys = PageKeys(request.tenant_id, adapter_key, self._page_size, versions)
        if num_pages is None:
            num_pages = len(request.token_ids) // self._page_size
        return keys.first(num_pages, request.token_ids)
