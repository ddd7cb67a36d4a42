"""A job's events as they happen: server-sent events, until the job has ended.

The stream asks the database, because the trainer writes there and nowhere else. It holds no
connection between two questions. A process serves a bounded number of them, of each tenant fewer.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

from django.http import StreamingHttpResponse

from controlplane.errors import ApiError, RateLimited
from controlplane.gateway.event_stream import KEEP_ALIVE, KEEP_ALIVE_S
from controlplane.inference.answers import DONE, sse

MAX_STREAMS, MAX_TENANT_STREAMS = 200, 10
#: The pause between two questions; longer while nothing happens.
PAUSE_S, MOST_PAUSE_S = 0.5, 3.0
#: Seconds after which a stream ends without `[DONE]`; the client resumes it with `after`.
MOST_S = 3600.0
PAGE = 200

_open: Counter[uuid.UUID] = Counter()


class Page(NamedTuple):
    """The next events, oldest first, and whether the job has ended and these are the last."""

    events: list[dict[str, Any]]
    is_last: bool


#: Returns the events after the one of this id; None: from the first on. Raises ApiError.
Ask = Callable[[str | None], Awaitable[Page]]


async def live_events(tenant_id: uuid.UUID, ask: Ask, after: str | None) -> StreamingHttpResponse:
    """Stream the events after one. Raises RateLimited, and what `ask` raises."""
    place = _Place(tenant_id)
    try:
        first = await ask(after)
    except BaseException:
        place.close()
        raise
    response = StreamingHttpResponse(
        _Stream(place, ask, after, first), content_type="text/event-stream"
    )
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"  # nginx would collect chunks
    return response


class _Place:
    """One of the process's places for streams. Raises RateLimited when the tenant has none left."""

    def __init__(self, tenant_id: uuid.UUID) -> None:
        if _open[tenant_id] >= MAX_TENANT_STREAMS or _open.total() >= MAX_STREAMS:
            raise RateLimited(
                f"Your organization has {_open[tenant_id]} streams of events open here; "
                f"{MAX_TENANT_STREAMS} is the limit. Close one, or ask for pages.",
                code="too_many_streams",
                retry_after_s=10,
            )
        _open[tenant_id] += 1
        self._tenant_id: uuid.UUID | None = tenant_id

    def close(self) -> None:
        if self._tenant_id is not None:
            tenant_id, self._tenant_id = self._tenant_id, None
            _open[tenant_id] -= 1
            if not _open[tenant_id]:
                del _open[tenant_id]


class _Stream:
    """The body. An object and not a bare generator: one that never started runs no `finally`."""

    def __init__(self, place: _Place, ask: Ask, after: str | None, first: Page) -> None:
        self._loop = asyncio.get_running_loop()
        self._place = place
        self._ask = ask
        self._after = after
        self._first = first

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._run()

    def close(self) -> None:
        """Free the place. Django calls this in a thread when the response has ended."""
        self._loop.call_soon_threadsafe(self._place.close)

    async def _run(self) -> AsyncIterator[bytes]:
        page, pause_s, quiet_since = self._first, PAUSE_S, time.monotonic()
        ends_at = time.monotonic() + MOST_S
        yield KEEP_ALIVE
        while True:
            if page.events:
                self._after = page.events[-1]["id"]
                pause_s, quiet_since = PAUSE_S, time.monotonic()
                yield b"".join(_event(event) for event in page.events)
            elif time.monotonic() - quiet_since > KEEP_ALIVE_S:
                quiet_since = time.monotonic()
                yield KEEP_ALIVE
            if page.is_last:
                yield DONE
                return
            if time.monotonic() > ends_at:
                return
            if len(page.events) < PAGE:
                await asyncio.sleep(pause_s)
                pause_s = min(MOST_PAUSE_S, pause_s * 1.5)
            try:
                page = await self._ask(self._after)
            except ApiError as error:  # the status has been sent
                yield sse(error.body())
                return


def _event(event: dict[str, Any]) -> bytes:
    return f"id: {event['id']}\n".encode() + sse(event)
