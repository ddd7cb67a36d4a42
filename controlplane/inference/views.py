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
from typing import Any

from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse

from controlplane import jobs
from controlplane.adapters.services import ResolvedModel
from controlplane.errors import ApiError, InternalError, MethodNotAllowed, NotFound, Unavailable
from controlplane.inference import access
from controlplane.inference.answers import (
    DONE,
    KEEP_ALIVE,
    Answer,
    ChatAnswer,
    CompletionAnswer,
    sse,
)
from controlplane.inference.generation import chat_job, client_param, completion_job
from controlplane.inference.parsing import parse_body
from controlplane.inference.schemas import ChatBody, CompletionBody, GenerationBody
from controlplane.limits.admission import rate_headers
from controlplane.replies import Reply
from controlplane.scoping import new_id
from worker.protocol import ErrorCode, FinishReason, GenerateJob, TokenEvent

log = logging.getLogger(__name__)

#: A stream that has nothing to say for this long begins, or goes on, with a comment.
KEEP_ALIVE_S = 10.0

View = Callable[..., Coroutine[Any, Any, HttpResponseBase]]


def gateway_view(*methods: str) -> Callable[[View], View]:
    """A view under /v1: one of `methods`, errors in OpenAI's body, its headers on every answer."""

    def decorate(view: View) -> View:
        @functools.wraps(view)
        async def wrapper(request: HttpRequest, **kwargs: Any) -> HttpResponseBase:
            started = time.perf_counter()
            request_id = request.request_id = new_id().hex  # type: ignore[attr-defined]
            try:
                if request.method not in methods:
                    raise MethodNotAllowed(f"{request.method} is not allowed here.", methods)
                response = await view(request, **kwargs)
            except ApiError as error:
                response = error.response()
            except Exception:
                log.exception("request %s failed", request_id)
                response = InternalError("The server failed on this request.").response()
            for name, value in getattr(request, "rate_headers", {}).items():
                response.setdefault(name, value)
            response["x-request-id"] = f"req_{request_id}"
            response["openai-processing-ms"] = str(round((time.perf_counter() - started) * 1000))
            return response

        return wrapper

    return decorate


@gateway_view("POST")
async def chat_completions(request: HttpRequest) -> HttpResponseBase:
    return await _generate(request, ChatBody, chat_job, ChatAnswer, "chatcmpl")


@gateway_view("POST")
async def completions(request: HttpRequest) -> HttpResponseBase:
    return await _generate(request, CompletionBody, completion_job, CompletionAnswer, "cmpl")


@gateway_view("GET")
async def model_list(request: HttpRequest) -> HttpResponseBase:
    models = await access.models(request)
    return JsonResponse({"object": "list", "data": [_model_body(model) for model in models]})


@gateway_view("GET")
async def model_detail(request: HttpRequest, name: str) -> HttpResponseBase:
    _, model = await access.admit(request, name)
    return JsonResponse(_model_body(model))


@gateway_view("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
async def unknown(request: HttpRequest, path: str) -> HttpResponseBase:
    raise NotFound(f"There is no {request.method} /v1/{path[:200]}.", code="unknown_url")


def _model_body(model: ResolvedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "lorikeet" if model.version is None else "tenant",
        "parent": None if model.version is None else model.base_model.name,
        "shutdown_date": None,
    }


async def _generate(
    request: HttpRequest,
    kind: type[Any],
    to_job: Callable[..., GenerateJob],
    answer_kind: type[ChatAnswer | CompletionAnswer],
    prefix: str,
) -> HttpResponseBase:
    """Check, submit, and answer once the first event is there."""
    body, model, principal = await _checked(request, kind)
    dispatcher = await jobs.dispatcher()
    request_id: str = request.request_id  # type: ignore[attr-defined]
    job = to_job(
        body,
        model,
        principal,
        request_id=f"req_{request_id}",
        gateway_id=dispatcher.gateway_id,
    )
    answer = answer_kind(
        answer_id=f"{prefix}-{request_id}",
        created=int(job.created_at),
        model=body.model,
        fingerprint=_fingerprint(model),
        with_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    limits = await access.limits_of(principal, body.model)
    reply, admitted = await dispatcher.submit(
        job, limits, context_length=model.base_model.context_length
    )
    request.rate_headers = rate_headers(admitted)  # type: ignore[attr-defined]
    is_handed_on = False
    try:
        # Until it is known how the request fares, the status can still say so.
        event = await _take(reply, job, KEEP_ALIVE_S if body.stream else None)
        if not body.stream:
            assert event is not None
            return JsonResponse(answer.whole(event))
        is_handed_on = True
    finally:
        if not is_handed_on:  # also when the client went away
            dispatcher.leave(reply)
    return _stream_response(_Stream(dispatcher, reply, job, answer, event))


async def _checked(
    request: HttpRequest, kind: type[GenerationBody]
) -> tuple[Any, ResolvedModel, Any]:
    """The body, what its model means to the caller, and the caller. A wrong key comes first."""
    try:
        body = parse_body(kind, request.read())  # `request.body` has a smaller bound of its own
    except ApiError:
        await access.authenticate(request)
        raise
    principal, model = await access.admit(request, body.model)
    return body, model, principal


async def _take(reply: Reply, job: GenerateJob, timeout_s: float | None) -> TokenEvent | None:
    try:
        event = await reply.take(timeout_s)
    except ApiError as error:
        error.param = client_param(job, error.param, error.code)
        raise
    if event is not None and event.finish_reason == FinishReason.CANCELLED:
        # Not by its client, who is still here: its worker took this gateway for dead.
        raise Unavailable("The request was cancelled.", code=ErrorCode.WORKER_LOST)
    return event


def _fingerprint(model: ResolvedModel) -> str:
    """Changes when the weights that answer do."""
    digest = model.version.digest if model.version else model.base_model.revision
    return f"fp_{digest[:12]}"


class _Stream:
    """The body of a streamed answer. Closing it early cancels the generation.

    An object and not a bare generator: a generator that was never started runs no `finally`, and
    a client may leave between the first event and the first chunk.
    """

    def __init__(
        self,
        dispatcher: jobs.Dispatcher,
        reply: Reply,
        job: GenerateJob,
        answer: Answer,
        first: TokenEvent | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._dispatcher = dispatcher
        self._reply = reply
        self._chunks = self._run(job, answer, first)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._chunks

    def close(self) -> None:
        """Django calls this, in a thread, when the response is done with."""
        self._loop.call_soon_threadsafe(self._dispatcher.leave, self._reply)

    async def _run(
        self, job: GenerateJob, answer: Answer, event: TokenEvent | None
    ) -> AsyncIterator[bytes]:
        try:
            for chunk in answer.opening():
                yield chunk
            while True:
                if event is None:
                    yield KEEP_ALIVE
                elif chunks := b"".join(answer.chunks(event)):
                    yield chunks
                if event is not None and event.finish_reason is not None:
                    break
                event = await _take(self._reply, job, KEEP_ALIVE_S)
            yield DONE
        except ApiError as error:  # the status is long sent
            yield sse(error.body())
        finally:
            self._dispatcher.leave(self._reply)


def _stream_response(stream: _Stream) -> StreamingHttpResponse:
    response = StreamingHttpResponse(stream, content_type="text/event-stream")
    response["Cache-Control"] = "no-cache"
    response["X-Accel-Buffering"] = "no"  # nginx would collect chunks
    return response
