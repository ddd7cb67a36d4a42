"""The path of requests to /v1: each goes through `gateway_view`, in this order.

    bounds        the web server's, and `body_limit`, before Django sees the request
    the key       before the body is parsed: from memory, or in one visit to the database; where a
                  body comes slowly, `body_limit` has asked `is_known` before
    the body      `GatewayRequest.parse`
    the model     `GatewayRequest.admit`, with the limits: from memory, or in one visit
    the queue     `GatewayRequest.admit`

No database connection is held while an answer is generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from importlib import import_module
from typing import Any, TypeVar

from django.conf import settings
from django.contrib.auth import get_user
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse

from contract.messages.protocol import GenerateJob
from controlplane.errors import ApiError, InternalError, MethodNotAllowed
from controlplane.events.audit.origin import request_origin
from controlplane.gateway import last_uses
from controlplane.gateway.cross_origin import check_origin
from controlplane.inference import access
from controlplane.inference.default_base import default_base
from controlplane.inference.service import Generation, SubmittedBody, new_request_id, submit
from controlplane.infra.metrics import count_refusal
from controlplane.infra.web.request_lines import RequestLine
from controlplane.infra.web.threads import query_in_thread
from controlplane.queue.dispatcher import running_dispatcher
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth
from controlplane.tenants.auth import Permission, Principal, authorize, caller_scope

log = logging.getLogger(__name__)

#: The version of OpenAI's API that answers follow.
OPENAI_VERSION = "2020-10-01"

#: The beginning of the addresses of Tinker's client.
TINKER = "/tinker/"

#: A shorter body takes a few milliseconds at most to parse, whatever is in it.
LONG_BODY_BYTES = 16 * 1024

_T = TypeVar("_T")


@dataclasses.dataclass(slots=True, eq=False)
class GatewayRequest:
    """A request on its way through `gateway_view`.

    http        as Django has it
    line        its line in the log, which has its ids
    principal   the caller; unset for an address that needs no key
    generation  what answers; None until it is admitted
    """

    http: HttpRequest
    line: RequestLine
    principal: Principal = dataclasses.field(init=False)
    generation: Generation | None = None

    async def authenticate(self, permission: Permission) -> None:
        """Let the caller in; a stream that lasts does it again.

        Raises ApiError if the key is wrong or lacks the permission, or for a page of another
        origin.
        """
        self.principal = await auth.find_principal(*_credentials(self.http))
        last_uses.note(self.principal)
        self.line.add(**self.principal.log_fields)
        check_origin(self.http, self.principal.tenant)
        authorize(self.principal, permission)

    async def parse(self, parse: Callable[[bytes], _T]) -> _T:
        """Return the parsed body; a long one is parsed in a thread, so as not to delay others."""
        sent = self.http.read()  # `body` has a smaller bound of its own
        return parse(sent) if len(sent) <= LONG_BODY_BYTES else await asyncio.to_thread(parse, sent)

    async def admit(
        self,
        body: SubmittedBody,
        *,
        endpoint: str = "",
        adjust: Callable[[GenerateJob], GenerateJob] | None = None,
    ) -> Generation:
        """Have a checked body accepted: find the model and the limits, and queue it.

        An empty model, which LoRAX's clients send, becomes the base model's name in `body`. The
        rest is as `submit` has it. Raises ApiError.
        """
        if body.model == "" and not body.adapters:
            body.model = (await default_base("model")).name
        caller = await access.resolve(self.principal, body.selector())

        def named(job: GenerateJob) -> GenerateJob:
            job = job if adjust is None else adjust(job)
            return dataclasses.replace(job, client_request_id=self.line.client_request_id)

        self.generation = await submit(
            caller,
            body,
            request_id=self.line.request_id,
            endpoint=endpoint,
            adjust=adjust if self.line.client_request_id is None else named,
        )
        self.line.add_later(self.generation.log_fields)
        return self.generation

    def as_caller(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Return `work` so that it runs in the caller's scope and is audited as the caller's."""
        principal = self.principal

        def run() -> _T:
            self.http.user = principal  # type: ignore[assignment]  # as Django REST framework does
            with caller_scope(principal), request_origin(self.http, self.line.request_id):
                return work()

        return run

    def finish(self, response: HttpResponseBase, started: float) -> None:
        """Set the headers that all answers of /v1 have, and end the line in the log.

        started  when the request came, in seconds of time.perf_counter
        """
        if self.generation is not None:
            for name, value in self.generation.headers.items():
                response.setdefault(name, value)
            for name, value in self.generation.served_headers.items():
                response[name] = value
        if hasattr(self, "principal"):
            response["openai-organization"] = self.principal.tenant.slug
        response["openai-version"] = OPENAI_VERSION
        response["openai-processing-ms"] = str(round((time.perf_counter() - started) * 1000))
        self.line.end_with(response)

    def count_refusal(self, error: ApiError) -> None:
        """Count a refusal in the log of the caller's tenant; accepted requests have records."""
        if self.generation is not None:
            return
        count_refusal(error.code)
        dispatcher, match = running_dispatcher(), self.http.resolver_match
        tenant = auth.tenant_known(*_credentials(self.http))  # some are refused before the key
        if dispatcher is not None and tenant is not None and match is not None:
            # The pattern, not the path: a client can make any number of paths.
            endpoint, code = f"/{match.route}", error.code or ""
            dispatcher.recorder.refuse(tenant.id, endpoint, error.status, code)


View = Callable[..., Coroutine[Any, Any, HttpResponseBase]]


def gateway_view(
    needed: Mapping[str, Permission | None],
    *,
    errors: Callable[[ApiError], HttpResponseBase] = ApiError.response,
) -> Callable[[View], View]:
    """Make a view of the gateway: it takes a GatewayRequest whose caller is let in, and runs in
    the scope of the caller's tenant.

    HEAD is answered as GET where that is one of the methods; the server leaves the body out.

    needed  the permission that each method needs; None: not even a key
    errors  makes the answer to a failure; the default is OpenAI's body
    """

    def decorate(view: View) -> View:
        @functools.wraps(view)
        async def wrapper(http: HttpRequest, **kwargs: Any) -> HttpResponseBase:
            started = time.perf_counter()
            request = GatewayRequest(http, RequestLine(http, new_request_id()))
            is_head = http.method == "HEAD" and "GET" in needed and "HEAD" not in needed
            if is_head:
                http.method = "GET"
            method = http.method or ""
            try:
                if method not in needed:
                    raise MethodNotAllowed(f"{method} is not allowed here.", tuple(needed))
                with request.line, contextlib.ExitStack() as scope:
                    if (permission := needed[method]) is not None:
                        await request.authenticate(permission)
                        scope.enter_context(tenant_scope(request.principal.tenant.id))
                    response = await view(request, **kwargs)
            except ApiError as error:
                response, request.line.code = errors(error), error.code
                request.count_refusal(error)
            except Exception:
                log.exception("a request failed")
                response = errors(InternalError("The server failed on this request."))
            if is_head and isinstance(response, StreamingHttpResponse):
                response.streaming_content = ()  # nobody fetches what nobody gets
            request.finish(response, started)
            return response

        return wrapper

    return decorate


async def is_known(scope: dict[str, Any]) -> bool:
    """Return whether a request whose body is on its way has a valid key, from an address that may
    use it, or the session of a signed-in person.
    """
    request = ASGIRequest(scope, None)  # type: ignore[arg-type]  # its body is not read

    def has_session() -> bool:
        engine = import_module(settings.SESSION_ENGINE)
        cookie = request.COOKIES.get(settings.SESSION_COOKIE_NAME)
        request.session = engine.SessionStore(cookie)
        return bool(get_user(request).is_authenticated)

    header, address = _credentials(request)
    try:
        if header is None:
            return await query_in_thread(has_session)
        await auth.find_principal(header, address)
    except ApiError:
        return False
    return True


def _credentials(request: HttpRequest) -> tuple[str | None, str]:
    """Return the Authorization header and the client's address.

    Tinker's client has another header, and wants a prefix before the key.
    """
    header = request.headers.get("Authorization")
    key = request.headers.get("X-API-Key")
    if key is not None and request.path.startswith(TINKER):
        header = f"Bearer {key.removeprefix('tml-')}"
    return header, request.META.get("REMOTE_ADDR") or ""
