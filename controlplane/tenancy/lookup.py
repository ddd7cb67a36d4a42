"""Look up what the database says: in memory while that is fresh, else there.

While the database is away, what it said last is used. That may be `DATABASE_AWAY_S` old, however
often it is used, and only if the epochs in Redis say that nothing of it was taken away since
(`controlplane.tenancy.epochs`). Only gateways do so: batches wait for the database.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
import uuid
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from controlplane.errors import ApiError
from controlplane.infra.circuit import circuit
from controlplane.infra.outages import DatabaseAway
from controlplane.infra.web.threads import query_in_thread
from controlplane.tenancy import epochs

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")
_T = TypeVar("_T")

#: After this the database is doubted: others with a kept answer no longer wait for it.
DOUBT_S = 0.25
#: Most seconds that a request waits for the database, with and without a kept answer.
KEPT_WAIT_S, WAIT_S = 0.5, 3.0


class Kept(NamedTuple, Generic[_V]):
    """An earlier answer of the database.

    asked      from before the query, which may take long
    tenant_id  the tenant that it belongs to; None: the platform
    """

    value: _V
    asked: epochs.Stamp
    tenant_id: uuid.UUID | None


class Lookup(Generic[_K, _V]):
    """Answers of the database by what was asked for; those that were put in first make room.

    fresh_s    seconds for which an answer is used without a query
    num_bytes  what an answer counts for; None: only their number is bounded
    """

    def __init__(
        self,
        *,
        fresh_s: float,
        max_entries: int,
        max_bytes: int = 0,
        num_bytes: Callable[[_V], int] | None = None,
    ) -> None:
        self.max_entries, self.max_bytes = max_entries, max_bytes
        #: Bytes of all kept answers together.
        self.num_bytes = 0
        self._fresh_s = fresh_s
        self._bytes_of = num_bytes or (lambda value: 0)
        self._kept: collections.OrderedDict[_K, Kept[_V]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def put(
        self, key: _K, value: _V, asked: epochs.Stamp, tenant_id: uuid.UUID | None = None
    ) -> None:
        with self._lock:
            self._drop(key)  # so that it comes last
            self._kept[key] = Kept(value, asked, tenant_id)
            self.num_bytes += self._bytes_of(value)
            while len(self._kept) > self.max_entries or self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._kept)))

    def forget(self, *keys: _K) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)

    def keys(self) -> list[_K]:
        """Return what was asked for, the oldest answer first."""
        return list(self._kept)

    def fresh(self, *keys: _K) -> list[_V] | None:
        """Return the answers; None if one of them is not fresh."""
        found = [self._kept.get(key) for key in keys]
        oldest = time.monotonic() - self._fresh_s
        fresh = [each.value for each in found if each is not None and each.asked.at > oldest]
        return fresh if len(fresh) == len(keys) else None

    def kept(self, *keys: _K) -> Kept[list[_V]] | None:
        """Return answers of one tenant for while the database is away; None if one is too old."""
        found = [self._kept.get(key) for key in keys]
        kept = [each for each in found if each is not None and each.asked.is_recent]
        if len(kept) < len(keys):
            return None
        # What was read later than the first answer holds if that does.
        oldest = min(kept, key=lambda each: each.asked.at)
        return oldest._replace(value=[each.value for each in kept])  # type: ignore[arg-type, return-value]

    async def find(
        self, keys: Sequence[_K], take: Callable[[list[_V]], _T | None], query: Callable[[], _T]
    ) -> _T:
        """Return what `take` makes of fresh answers, or else what the query finds.

        While the database is away: what `take` makes of earlier answers, if they hold.

        take   returns None for answers that cannot be used; raises ApiError
        query  runs in a thread, and puts in what it finds
        Raises what `take` raises of fresh answers, and what `query_in_thread` raises.
        """
        fresh = self.fresh(*keys)
        if fresh is not None and (found := take(fresh)) is not None:
            return found
        return await _ask(query, self._taken(keys, take))

    def _taken(self, keys: Sequence[_K], take: Callable[[list[_V]], _T | None]) -> Kept[_T] | None:
        if (kept := self.kept(*keys)) is None:
            return None
        try:
            found = take(kept.value)
        except ApiError:
            return None
        return None if found is None else Kept(found, kept.asked, kept.tenant_id)

    def _drop(self, key: _K) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self.num_bytes -= self._bytes_of(found.value)


async def _ask(query: Callable[[], _T], kept: Kept[_T] | None) -> _T:
    if circuit.is_doubted and kept is not None and await epochs.hold(kept.tenant_id, kept.asked):
        return kept.value
    late = asyncio.get_running_loop().call_later(DOUBT_S, circuit.doubt)
    try:
        return await query_in_thread(query, total_s=WAIT_S if kept is None else KEPT_WAIT_S)
    except DatabaseAway:
        if kept is not None and await epochs.hold(kept.tenant_id, kept.asked):
            return kept.value
        raise
    finally:
        late.cancel()
