"""POST /v1/chat/completions, /v1/completions, /v1/embeddings; addresses that do not exist."""

from __future__ import annotations

from django.http import HttpResponseBase, JsonResponse

from controlplane.gateway.door import GatewayRequest, gateway_view
from controlplane.gateway.event_stream import streamed
from controlplane.inference.answers import DONE
from controlplane.inference.parsing import parse_body
from controlplane.inference.schemas import ChatBody, CompletionBody
from controlplane.inference.vectors import EmbeddingsBody
from controlplane.infra.web.addresses import no_such_address
from controlplane.tenants.permissions import Permission

_ALL_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@gateway_view({"POST": Permission.INFER})
async def chat_completions(request: GatewayRequest) -> HttpResponseBase:
    return await _generate(request, ChatBody)


@gateway_view({"POST": Permission.INFER})
async def completions(request: GatewayRequest) -> HttpResponseBase:
    return await _generate(request, CompletionBody)


@gateway_view({"POST": Permission.INFER})
async def embeddings(request: GatewayRequest) -> HttpResponseBase:
    return await _generate(request, EmbeddingsBody)


@gateway_view(dict.fromkeys(_ALL_METHODS))
async def unknown(request: GatewayRequest, path: str) -> HttpResponseBase:
    raise no_such_address(request.http)


async def _generate(
    request: GatewayRequest, kind: type[ChatBody | CompletionBody | EmbeddingsBody]
) -> HttpResponseBase:
    """Check, admit, and answer once the first event is there."""
    body = await request.parse(lambda sent: parse_body(kind, sent))
    generation = await request.admit(body)
    if body.stream:
        return await streamed(generation, generation.answer(), ending=DONE)
    try:
        return JsonResponse(await generation.whole())
    finally:
        generation.leave()
