"""Go on with what the database said last, while it is away.

Only gateways do: batches wait for the database. What was said may be used for `DATABASE_AWAY_S`
from the time at which it was asked for, however often it is used, and only if the epochs in Redis
say that nothing of it was taken away since (`controlplane.tenancy.epochs`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from controlplane.infra.circuit import circuit
from controlplane.infra.outages import DatabaseAway
from controlplane.infra.threads import query_in_thread
from controlplane.queue.dispatcher import get_dispatcher
from controlplane.tenancy.epochs import Stamp

_T = TypeVar("_T")

#: After this the database is doubted: others with a kept answer no longer wait for it.
DOUBT_S = 0.25
#: Most seconds that a request waits for the database, with and without a kept answer.
KEPT_WAIT_S, WAIT_S = 0.5, 3.0


class Kept(NamedTuple, Generic[_T]):
    """An earlier answer of the database.

    tenant_id  whose it is; None: the platform's
    """

    answer: _T
    tenant_id: uuid.UUID | None
    stamps: tuple[Stamp, ...]


async def ask(query: Callable[[], _T], kept: Kept[_T] | None) -> _T:
    """Return what the query finds, or what is kept when the database is away.

    Raises what `query_in_thread` raises.
    """
    if circuit.is_doubted and kept is not None and await _holds(kept):
        return kept.answer
    late = asyncio.get_running_loop().call_later(DOUBT_S, circuit.doubt)
    try:
        return await query_in_thread(query, total_s=WAIT_S if kept is None else KEPT_WAIT_S)
    except DatabaseAway:
        if kept is not None and await _holds(kept):
            return kept.answer
        raise
    finally:
        late.cancel()


async def _holds(kept: Kept[_T]) -> bool:
    if not all(stamp.is_recent for stamp in kept.stamps):
        return False
    return await (await get_dispatcher()).epochs.hold(kept.tenant_id, kept.stamps)
