"""The gateway: /v1, as OpenAI's API. Plain async views. Only these wait for a thread: looking up a
key and a model that are not fresh in memory, parsing a long body, reading what a budget has spent.

No database connection is held while an answer is generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from django.http import HttpRequest, HttpResponseBase, JsonResponse, StreamingHttpResponse

from contract.protocol import GenerateJob
from controlplane.errors import ApiError, InternalError, MethodNotAllowed
from controlplane.gateway import callers
from controlplane.gateway.event_stream import streamed
from controlplane.inference.answers import DONE, sse
from controlplane.inference.default_base import default_base
from controlplane.inference.parsing import parse_body
from controlplane.inference.schemas import ChatBody, CompletionBody
from controlplane.inference.service import Generation, new_request_id, submit
from controlplane.infra.addresses import no_such_address
from controlplane.infra.metrics import count_refusal
from controlplane.infra.request_lines import RequestLine
from controlplane.queue.dispatcher import running_dispatcher
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.auth import Principal

log = logging.getLogger(__name__)

#: The version of OpenAI's API that answers follow.
OPENAI_VERSION = "2020-10-01"

#: A shorter body takes a few milliseconds at most to parse, whatever is in it.
LONG_BODY_BYTES = 16 * 1024

_T = TypeVar("_T")
View = Callable[..., Coroutine[Any, Any, HttpResponseBase]]


def gateway_view(
    *methods: str, errors: Callable[[ApiError], HttpResponseBase] = ApiError.response
) -> Callable[[View], View]:
    """Make a view of the gateway: it takes these methods and sets OpenAI's headers.

    HEAD is answered as GET where that is one of them; the server leaves the body out.

    errors  makes the answer to a failure; the default is OpenAI's body
    """

    def decorate(view: View) -> View:
        @functools.wraps(view)
        async def wrapper(request: HttpRequest, **kwargs: Any) -> HttpResponseBase:
            started = time.perf_counter()
            line = RequestLine(request, new_request_id())
            is_head = request.method == "HEAD" and "GET" in methods and "HEAD" not in methods
            if is_head:
                request.method = "GET"
            try:
                if request.method not in methods:
                    raise MethodNotAllowed(f"{request.method} is not allowed here.", methods)
                with line:
                    response = await view(request, **kwargs)
            except ApiError as error:
                response, line.code = errors(error), error.code
                _count_refusal(request, error)
            except Exception:
                log.exception("a request failed")
                response = errors(InternalError("The server failed on this request."))
            if is_head and isinstance(response, StreamingHttpResponse):
                response.streaming_content = ()  # nobody fetches what nobody gets
            for name, value in getattr(request, "rate_headers", {}).items():
                response.setdefault(name, value)
            generation: Generation | None = getattr(request, "generation", None)
            if generation is not None:
                for name, value in generation.served_headers.items():
                    response[name] = value
            principal: Principal | None = getattr(request, "principal", None)
            if principal is not None:
                response["openai-organization"] = principal.tenant.slug
            response["openai-version"] = OPENAI_VERSION
            response["openai-processing-ms"] = str(round((time.perf_counter() - started) * 1000))
            line.end_with(response)
            return response

        return wrapper

    return decorate


def _count_refusal(request: HttpRequest, error: ApiError) -> None:
    """Count a refusal in the log of the caller's tenant; accepted requests have records."""
    if hasattr(request, "rate_headers"):
        return
    count_refusal(error.code)
    dispatcher, tenant_id = running_dispatcher(), callers.known_tenant(request)
    if dispatcher is not None and tenant_id is not None and request.resolver_match is not None:
        # The pattern, not the path: a client can make any number of paths.
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
    raise no_such_address(request)


async def _generate(
    request: HttpRequest, kind: type[ChatBody] | type[CompletionBody]
) -> HttpResponseBase:
    """Check, admit, and answer once the first event is there."""
    body = await read_body(request, lambda sent: parse_body(kind, sent))
    generation = await admit(request, body)
    if body.stream:
        return await streamed(generation, generation.answer(), failure=_failure, ending=DONE)
    try:
        return JsonResponse(await generation.whole())
    finally:
        generation.leave()


def _failure(error: ApiError) -> bytes:
    return sse(error.body())


async def admit(
    request: HttpRequest,
    body: ChatBody | CompletionBody,
    *,
    endpoint: str = "",
    adjust: Callable[[GenerateJob], GenerateJob] | None = None,
) -> Generation:
    """Have a checked body accepted: find its caller, the model and the limits, and queue it.

    An empty model, which LoRAX's clients send, becomes the base model's name in `body`. The rest
    is as `submit` has it. Raises ApiError; a wrong key comes first.
    """
    if body.model == "" and not body.adapters:
        await callers.authenticate(request)
        body.model = (await default_base("model")).name
    caller = await callers.caller_of(request, body.selector())
    line: RequestLine = request.line  # type: ignore[attr-defined]

    def named(job: GenerateJob) -> GenerateJob:
        job = job if adjust is None else adjust(job)
        return dataclasses.replace(job, client_request_id=line.client_request_id)

    generation = await submit(
        caller,
        body,
        request_id=line.request_id,
        endpoint=endpoint,
        adjust=adjust if line.client_request_id is None else named,
    )
    line.add_later(generation.log_fields)
    request.rate_headers = generation.headers  # type: ignore[attr-defined]
    request.generation = generation  # type: ignore[attr-defined]
    return generation


async def read_body(request: HttpRequest, parse: Callable[[bytes], _T]) -> _T:
    """Parse the body; a fault of the key comes before one of the body.

    A long body is parsed for known callers only, and in a thread, so that others go on.
    """
    sent = request.read()  # `request.body` has a smaller bound of its own
    if len(sent) > LONG_BODY_BYTES:
        principal = await callers.authenticate(request)
        with tenant_scope(principal.tenant.id):
            return await asyncio.to_thread(parse, sent)
    tenant_id = callers.known_tenant(request)
    try:
        with contextlib.nullcontext() if tenant_id is None else tenant_scope(tenant_id):
            return parse(sent)
    except ApiError:
        await callers.authenticate(request)
        raise


def request_id_of(request: HttpRequest) -> str:
    """Return the id that the answer has as x-request-id."""
    return str(request.line.request_id)  # type: ignore[attr-defined]
