"""The gateway: /v1, in OpenAI's words. Plain async views; nothing here waits on a thread but the
key and the model's name, and those only when they are not fresh in memory.

No database connection is held while an answer is generated.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse

from controlplane import jobs
from controlplane.errors import ApiError, InternalError, MethodNotAllowed, NotFound
from controlplane.inference import access
from controlplane.inference.answers import DONE, KEEP_ALIVE, sse
from controlplane.inference.parsing import parse_body
from controlplane.inference.schemas import ChatBody, CompletionBody, GenerationBody
from controlplane.inference.service import Generation, new_request_id, submit
from controlplane.tenants.auth import Principal
from worker.protocol import TokenEvent

log = logging.getLogger(__name__)

#: Of the API that answers follow, as OpenAI counts.
OPENAI_VERSION = "2020-10-01"
#: A stream that has nothing to say for this long begins, or goes on, with a comment.
KEEP_ALIVE_S = 10.0

_B = TypeVar("_B", bound=GenerationBody)
View = Callable[..., Coroutine[Any, Any, HttpResponseBase]]


def gateway_view(*methods: str) -> Callable[[View], View]:
    """A view under /v1: one of `methods`, errors in OpenAI's body, its headers on every answer."""

    def decorate(view: View) -> View:
        @functools.wraps(view)
        async def wrapper(request: HttpRequest, **kwargs: Any) -> HttpResponseBase:
            started = time.perf_counter()
            request_id = request.request_id = new_request_id()  # type: ignore[attr-defined]
            try:
                if request.method not in methods:
                    raise MethodNotAllowed(f"{request.method} is not allowed here.", methods)
                response = await view(request, **kwargs)
            except ApiError as error:
                response = error.response()
                _count_refusal(request, error)
            except Exception:
                log.exception("request %s failed", request_id)
                response = InternalError("The server failed on this request.").response()
            for name, value in getattr(request, "rate_headers", {}).items():
                response.setdefault(name, value)
            principal: Principal | None = getattr(request, "principal", None)
            if principal is not None:
                response["openai-organization"] = principal.tenant.slug
            response["openai-version"] = OPENAI_VERSION
            response["x-request-id"] = request_id
            response["openai-processing-ms"] = str(round((time.perf_counter() - started) * 1000))
            return response

        return wrapper

    return decorate


def _count_refusal(request: HttpRequest, error: ApiError) -> None:
    """In the log of the caller's tenant. What was accepted has a record instead."""
    if hasattr(request, "rate_headers"):
        return
    dispatcher, tenant_id = jobs.running_dispatcher(), access.known_tenant(request)
    if dispatcher is not None and tenant_id is not None and request.resolver_match is not None:
        # The pattern and not the path, which a client can make as many of as it likes.
        endpoint = f"/{request.resolver_match.route}"
        dispatcher.recorder.refuse(tenant_id, endpoint, error.status, error.code or "")


@gateway_view("POST")
async def chat_completions(request: HttpRequest) -> HttpResponseBase:
    return await _generate(request, ChatBody)


@gateway_view("POST")
async def completions(request: HttpRequest) -> HttpResponseBase:
    return await _generate(request, CompletionBody)


@gateway_view("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
async def unknown(request: HttpRequest, path: str) -> HttpResponseBase:
    raise NotFound(f"There is no {request.method} /v1/{path[:200]}.", code="unknown_url")


async def _generate(
    request: HttpRequest, kind: type[ChatBody] | type[CompletionBody]
) -> HttpResponseBase:
    """Check, submit, and answer once the first event is there."""
    principal, body = await checked_body(request, kind)
    generation = await submit(principal, body, request_id=request_id_of(request))
    request.rate_headers = generation.headers  # type: ignore[attr-defined]
    is_handed_on = False
    try:
        if not body.stream:
            return JsonResponse(await generation.whole())
        # Until it is known how the request fares, the status can still say so.
        events = await generation.take(KEEP_ALIVE_S)
        is_handed_on = True
    finally:
        if not is_handed_on:  # also when the client went away
            generation.leave()
    return stream_response(_Stream(generation, events))


async def checked_body(request: HttpRequest, kind: type[_B]) -> tuple[Principal, _B]:
    """The caller and the body. A wrong key comes first, and one visit finds all that is needed.

    Raises ApiError.
    """
    try:
        body = parse_body(kind, request.read())  # `request.body` has a smaller bound of its own
    except ApiError:
        await access.authenticate(request)
        raise
    principal, _ = await access.admit(request, body.named())
    return principal, body


def request_id_of(request: HttpRequest) -> str:
    """The id that the answer's x-request-id has."""
    return str(request.request_id)  # type: ignore[attr-defined]


class _Stream:
    """The body of a streamed answer. Closing it early cancels the generation.

    An object and not a bare generator: a generator that was never started runs no `finally`, and
    a client may leave between the first event and the first chunk.
    """

    def __init__(self, generation: Generation, first: list[TokenEvent]) -> None:
        self._loop = asyncio.get_running_loop()
        self._generation = generation
        self._chunks = self._run(first)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks

    def close(self) -> None:
        """Django calls this, in a thread, when the response is done with."""
        self._loop.call_soon_threadsafe(self._generation.leave)

    async def _run(self, events: list[TokenEvent]) -> AsyncIterator[bytes]:
        answer = self._generation.answer()
        try:
            yield b"".join(answer.opening()) or KEEP_ALIVE
            while True:
                chunks = b"".join(chunk for event in events for chunk in answer.chunks(event))
                if chunks or not events:
                    yield chunks or KEEP_ALIVE
                if any(event.usage is not None for event in events):
                    break
                events = await self._generation.take(KEEP_ALIVE_S)
            yield DONE
        except ApiError as error:  # the status is long sent
            yield sse(error.body())
        finally:
            self._generation.leave()


def stream_response(stream: Any) -> StreamingHttpResponse:
    """Server-sent events, as `stream` yields them."""
    response = StreamingHttpResponse(stream, content_type="text/event-stream")
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"  # nginx would collect chunks
    return response
