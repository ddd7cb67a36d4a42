"""TenantCache: a bounded cache in which each tenant has its own entries.

What one tenant has put there is new to every other one, so that the time of an answer discloses
nothing of other tenants' content. Everything that is kept of such content, and found again by it,
is kept here. Standard library only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class TenantCache(Generic[_K, _V]):
    """The entries used most recently. Safe to use from several threads.

    size  most entries of all tenants together. When there are more, the tenant that has the most
          gives up the one that it has not used for longest: a flood of one tenant's displaces its
          own, and a tenant that is alone may fill the cache.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # Tenant -> its entries, the least recently used first.
        self._entries: OrderedDict[str, OrderedDict[_K, _V]] = OrderedDict()
        self._num_entries = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num_entries

    def get(self, tenant_id: str, key: _K) -> _V | None:
        """Return this tenant's value of the key; None if it has none."""
        with self._lock:
            own = self._entries.get(tenant_id)
            if own is None or key not in own:
                return None
            own.move_to_end(key)
            self._entries.move_to_end(tenant_id)
            return own[key]

    def put(self, tenant_id: str, key: _K, value: _V) -> None:
        """Store a tenant's value of the key, in place of an earlier one."""
        with self._lock:
            own = self._entries.setdefault(tenant_id, OrderedDict())
            self._num_entries += key not in own
            own[key] = value
            own.move_to_end(key)
            self._entries.move_to_end(tenant_id)
            if self._num_entries > self._size:
                self._drop_one()

    def _drop_one(self) -> None:
        most = max(self._entries, key=lambda tenant_id: len(self._entries[tenant_id]))
        self._entries[most].popitem(last=False)
        self._num_entries -= 1
        if not self._entries[most]:
            del self._entries[most]
