"""IdleAdapters: the adapters in the arena that nobody runs with. No torch here."""

from __future__ import annotations

from bisect import bisect_left, insort

from engine.adapter_pages import AdapterPages
from engine.adapter_record import Adapter
from engine.eviction import Holding, ReloadCosts, eviction_order

_Kind = tuple[int, bool]  # pages, whether its image is in host memory
_Entry = tuple[int, int, Adapter]  # last use, when it became idle, the adapter


class IdleAdapters:
    """Knows who goes first, as `eviction_order` says, however many there are.

    What an adapter is worth changes with every step. But of two that are as large and come back
    from the same place the one used less recently is worth less at any time: they are kept in that
    order, and only the first of each kind are compared.
    """

    def __init__(self, pages: AdapterPages, costs: ReloadCosts) -> None:
        self._pages, self._costs = pages, costs
        self._kinds: dict[_Kind, list[_Entry]] = {}
        self._entries: dict[Adapter, tuple[_Kind, _Entry]] = {}
        self._num_added = 0

    def __contains__(self, adapter: object) -> bool:
        return adapter in self._entries

    def add(self, adapter: Adapter) -> None:
        """From now on nobody runs with the adapter."""
        assert adapter.place is not None and adapter not in self._entries
        self._pages.set_idle(adapter.place, is_idle=True)
        self._enter(adapter)

    def remove(self, adapter: Adapter) -> None:
        """Somebody does again, or it leaves the arena."""
        assert adapter.place is not None
        self._pages.set_idle(adapter.place, is_idle=False)
        self._leave(adapter)

    def first(self, now: int) -> Holding[Adapter] | None:
        """Who goes first; None when there is none."""
        for adapter in [entries[0][2] for entries in self._kinds.values()]:
            self._put_right(adapter)
        heads = [self._holding(entries[0][2]) for entries in self._kinds.values()]
        return eviction_order(heads, now)[0] if heads else None

    def _put_right(self, adapter: Adapter) -> None:
        """Host memory may have dropped images: those adapters are worth more than their kind.

        So nobody goes too early while they are among it, as long as they are not its first.
        """
        while self._entries[adapter][0] != self._kind(adapter):
            kind, _ = self._entries[adapter]
            self._leave(adapter)
            self._enter(adapter)
            if kind not in self._kinds:
                return
            adapter = self._kinds[kind][0][2]

    def _enter(self, adapter: Adapter) -> None:
        kind, entry = self._kind(adapter), (adapter.last_use, self._num_added, adapter)
        self._num_added += 1
        insort(self._kinds.setdefault(kind, []), entry)
        self._entries[adapter] = kind, entry

    def _leave(self, adapter: Adapter) -> None:
        kind, entry = self._entries.pop(adapter)
        entries = self._kinds[kind]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._kinds[kind]

    def _kind(self, adapter: Adapter) -> _Kind:
        return adapter.num_pages, adapter.host is not None

    def _holding(self, adapter: Adapter) -> Holding[Adapter]:
        reload_s = self._costs.adapter(adapter.num_pages, is_in_host=adapter.host is not None)
        return Holding(adapter, adapter.num_pages, reload_s, adapter.last_use)

    def check_integrity(self, idle: set[Adapter]) -> None:
        """Raise AssertionError unless exactly `idle` are here, each in its place."""
        assert idle == self._entries.keys(), "an adapter is idle and used, or neither"
        for kind, entries in self._kinds.items():
            assert entries == sorted(entries)
            for entry in entries:
                assert self._entries[entry[2]] == (kind, entry)
                assert entry[0] == entry[2].last_use
        assert sum(map(len, self._kinds.values())) == len(idle)
