"""The playground: up to three models answer one prompt side by side.

The page's script asks for each column by itself, at `run`. What it sends is a body of
/v1/chat/completions, and it is checked, limited, logged and billed as one: see `run`. So is what
`vectors` answers, as a body of /v1/embeddings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import TypeVar

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from contract.messages.sampling import ANSWER_TOKENS, MAX_STOP_CHARS, RANGES
from controlplane.aliases.contents import contents_of
from controlplane.aliases.services import alias_get, revision_get
from controlplane.console import playground as reads
from controlplane.console.access import ConsoleRequest, member_call, member_page
from controlplane.errors import (
    ApiError,
    InvalidRequest,
    NotFound,
    PayloadTooLarge,
    UnsupportedMediaType,
)
from controlplane.gateway.door import LONG_BODY_BYTES
from controlplane.gateway.event_stream import streamed
from controlplane.inference import access
from controlplane.inference.access import Caller
from controlplane.inference.answers import DONE
from controlplane.inference.model_selector import ModelSelector
from controlplane.inference.parsing import make_body, parse_body
from controlplane.inference.schemas import ChatBody
from controlplane.inference.service import submit
from controlplane.inference.vectors import EmbeddingsBody, LabelsBody, VectorBody
from controlplane.infra.metrics import count_refusal
from controlplane.infra.web.request_lines import RequestLine
from controlplane.infra.web.threads import query_in_thread
from controlplane.queue.dispatcher import running_dispatcher
from controlplane.requestlog import services as log
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.auth import Permission, Principal
from controlplane.usage.limits.admit import Limits, Policy

#: The request log's name for the address of the playground's requests.
ENDPOINT = "/console/playground"
MAX_BODY_BYTES = 256 * 1024
#: Two pages of three columns.
MAX_STREAMS_OF_PERSON = 6
MAX_STREAMS_OF_TENANT = 24
#: Texts whose vectors are compared, and the numbers of each that are shown.
MAX_TEXTS = 2
NUM_SHOWN = 8

_B = TypeVar("_B", ChatBody, EmbeddingsBody)


@require_safe
@member_page(permission=Permission.INFER)
def playground(request: ConsoleRequest) -> HttpResponse:
    """Show the page; the address may name models, an alias, or a request to repeat."""
    start = reads.Start(columns=reads.wanted_columns(request.GET.getlist("model")))
    if request_id := request.GET.get("request", ""):
        start = _start_again(request, request_id)
    elif name := request.GET.get("alias", ""):
        start = reads.start_of_alias(name, contents_of(revision_get(alias=alias_get(name=name))))
    held = reads.held_versions(start.columns) if request.member.can_upload else []
    context = {
        "start": start,
        "script": dataclasses.asdict(start) | {"base_url": settings.BASE_URL},
        "names": reads.model_names(),
        "held": held,
        "max_columns": reads.MAX_COLUMNS,
        "ranges": RANGES | {"max_tokens": ANSWER_TOKENS},
        "max_stop_chars": MAX_STOP_CHARS,
    }
    return render(request, "console/playground.html", context)


def _start_again(request: ConsoleRequest, request_id: str) -> reads.Start:
    """Return the page for a logged request. Raises NotFound, PermissionDenied."""
    if "\0" in request_id:
        raise NotFound("There is no such request.")
    if not request.member.can_read_requests:
        return reads.Start(columns=[])
    row = log.request_get(request_id=request_id)
    words = None
    if request.member.can_read_words:
        try:
            words = log.content_get(request_id=row.request_id)
        except NotFound:
            pass  # the page says so
    return reads.start_of(row, words)


async def _run(request: HttpRequest, principal: Principal) -> HttpResponseBase:
    """Stream one column's answer in OpenAI's format, as the gateway does.

    The person's session and role are looked up in the database for each request, so an end of
    either holds at once. Their use has no API key: it is recorded under the tenant, with
    `ENDPOINT`, and the tenant's limits and budgets apply, those of the model too.
    """
    line: RequestLine = request.line  # type: ignore[attr-defined]
    try:
        with tenant_scope(principal.tenant.id):
            body = await _read_body(request, ChatBody)
        if not body.stream:
            raise InvalidRequest("The playground only streams: set stream to true.", param="stream")
        caller, served = await query_in_thread(lambda: _resolve(principal, body.selector()))
        caller = _bounded(caller)
        generation = await submit(caller, body, request_id=line.request_id, endpoint=ENDPOINT)
        line.add_later(generation.log_fields)
    except ApiError as error:
        _count_refusal(principal, error)
        raise
    response = await streamed(generation, generation.answer(), ending=DONE)
    for name, value in generation.headers.items():
        response[name] = value
    response["X-Lorikeet-Served"] = served
    return response


run = require_POST(member_call(_run, permission=Permission.INFER))


async def _vectors(request: HttpRequest, principal: Principal) -> HttpResponseBase:
    """Answer with the labels of a classifier, or the beginnings of vectors and their similarity."""
    line: RequestLine = request.line  # type: ignore[attr-defined]
    body: VectorBody
    try:
        body = await _read_body(request, EmbeddingsBody)
        if len(body.inputs()) > MAX_TEXTS:
            raise InvalidRequest(f"input: at most {MAX_TEXTS} texts are compared.", param="input")
        caller, _ = await query_in_thread(lambda: _resolve(principal, body.selector()))
        if caller.model.labels:
            body = make_body(LabelsBody, model=body.model, input=body.input)
        generation = await submit(
            _bounded(caller), body, request_id=line.request_id, endpoint=ENDPOINT
        )
        line.add_later(generation.log_fields)
        try:
            told = await generation.whole()
        finally:
            generation.leave()
    except ApiError as error:
        _count_refusal(principal, error)
        raise
    found, last = [each["embedding"] for each in told.get("data", ())], generation.reply.last
    products = [a * b for a, b in zip(*found, strict=True)] if len(found) == MAX_TEXTS else None
    return JsonResponse(
        {
            "labels": told.get("labels"),
            "vectors": [vector[:NUM_SHOWN] for vector in found],
            "dimensions": len(found[0]) if found else None,
            "similarity": None if products is None else sum(products),
            "prompt_tokens": last.usage.prompt_tokens if last and last.usage else 0,
        }
    )


vectors = require_POST(member_call(_vectors, permission=Permission.INFER))


async def _read_body(request: HttpRequest, kind: type[_B]) -> _B:
    if request.content_type != "application/json":
        raise UnsupportedMediaType("The body must be application/json.")
    sent = request.read(MAX_BODY_BYTES + 1)
    if len(sent) > MAX_BODY_BYTES:
        raise PayloadTooLarge(f"The playground takes {MAX_BODY_BYTES} bytes at most.")
    parse = functools.partial(parse_body, kind, sent)
    return parse() if len(sent) <= LONG_BODY_BYTES else await asyncio.to_thread(parse)


def _resolve(principal: Principal, selector: ModelSelector) -> tuple[Caller, str]:
    """Return the caller, and the exact name that answers, perhaps by the adapters' rows."""
    caller = access.known(principal, selector) or access.resolve_now(principal, selector)
    with tenant_scope(principal.tenant.id):
        return caller, reads.served_name(caller.model)


def _bounded(caller: Caller) -> Caller:
    """Bound the requests that a person, and a tenant's people, have running here at a time."""
    assert caller.principal.user is not None
    person = f"playground-{caller.principal.user.pk.hex}"
    policies = (
        Policy(id=person, scope="person", max_concurrent=MAX_STREAMS_OF_PERSON),
        Policy(id="playground", scope="playground", max_concurrent=MAX_STREAMS_OF_TENANT),
    )
    limits = Limits((*caller.limits.policies, *policies), caller.limits.budgets)
    return dataclasses.replace(caller, limits=limits)


def _count_refusal(principal: Principal, error: ApiError) -> None:
    count_refusal(error.code)
    if (dispatcher := running_dispatcher()) is not None:
        recorder = dispatcher.recorder
        recorder.refuse(principal.tenant.id, ENDPOINT, error.status, error.code or "")
