"""Stream answers of any API: events in, server-sent events out, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

from django.http import StreamingHttpResponse

from contract.messages.protocol import TokenEvent
from controlplane.errors import ApiError
from controlplane.inference.answers import sse
from controlplane.inference.service import Generation

#: Seconds without an event after which a stream sends a comment, also as its beginning.
KEEP_ALIVE_S = 10.0
#: A comment: clients skip it, proxies see that the connection lives.
KEEP_ALIVE = b": keep-alive\n\n"


class Writer(Protocol):
    """The form in which an API writes the events of one request."""

    def opening(self) -> Iterable[bytes]:
        """Return what a stream begins with."""
        ...

    def chunks(self, event: TokenEvent) -> Iterable[bytes]:
        """Return what one event adds."""
        ...


async def streamed(
    generation: Generation,
    writer: Writer,
    *,
    failure: Callable[[ApiError], bytes] = lambda error: sse(error.body()),
    ending: bytes = b"",
) -> StreamingHttpResponse:
    """Return the streamed answer, when its first event has come or `KEEP_ALIVE_S` has passed.

    failure  writes an error that comes when the status has been sent, as OpenAI does by default
    ending   bytes at the end of a stream that did not fail
    Raises ApiError while the status is not sent; then the generation is left.
    """
    is_handed_on = False
    try:
        events = await generation.take(KEEP_ALIVE_S)
        is_handed_on = True
    finally:
        if not is_handed_on:  # also when the client went away
            generation.leave()
    stream = _Stream(generation, writer, events, failure, ending)
    response = StreamingHttpResponse(stream, content_type="text/event-stream")
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"  # nginx would collect chunks
    return response


class _Stream:
    """The body of a streamed answer. Closing it early cancels the generation.

    An object and not a bare generator: a generator that was never started runs no `finally`, and
    a client may leave between the first event and the first chunk.
    """

    def __init__(
        self,
        generation: Generation,
        writer: Writer,
        first: list[TokenEvent],
        failure: Callable[[ApiError], bytes],
        ending: bytes,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._generation = generation
        self._writer = writer
        self._failure = failure
        self._ending = ending
        self._chunks = self._run(first)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks

    def close(self) -> None:
        """Leave the generation. Django calls this in a thread when the response has ended."""
        self._loop.call_soon_threadsafe(self._generation.leave)

    async def _run(self, events: list[TokenEvent]) -> AsyncIterator[bytes]:
        try:
            yield b"".join(self._writer.opening()) or KEEP_ALIVE
            while True:
                chunks = b"".join(chunk for event in events for chunk in self._writer.chunks(event))
                if chunks or not events:
                    yield chunks or KEEP_ALIVE
                if any(event.usage is not None for event in events):
                    break
                events = await self._generation.take(KEEP_ALIVE_S)
            if self._ending:
                yield self._ending
        except ApiError as error:  # the status has been sent
            yield self._failure(error)
        finally:
            self._generation.leave()
