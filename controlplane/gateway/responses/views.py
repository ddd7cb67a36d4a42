"""POST /v1/responses."""

from __future__ import annotations

from django.http import HttpResponseBase, JsonResponse

from controlplane.errors import ApiError, NotFound
from controlplane.gateway.door import GatewayRequest, gateway_view
from controlplane.gateway.event_stream import streamed
from controlplane.inference.parsing import parse_body
from controlplane.inference.responses.answers import answer_of
from controlplane.inference.responses.schemas import ResponsesBody
from controlplane.inference.responses.translation import chat_body, in_our_words
from controlplane.inference.schemas import ChatBody
from controlplane.tenants.permissions import Permission


@gateway_view({"POST": Permission.INFER})
async def responses(request: GatewayRequest) -> HttpResponseBase:
    """Answer a request; the response is not kept to be continued or fetched."""
    body, chat = await _bodies(request)
    try:
        generation = await request.admit(
            chat, endpoint=ResponsesBody.endpoint, adjust=body.adjusted
        )
        answer = answer_of(body, generation)
        if body.stream:
            return await streamed(
                generation, answer, failure=lambda error: answer.failure(in_our_words(error))
            )
        try:
            return JsonResponse(answer.whole([event async for event in generation.events()]))
        finally:
            generation.leave()
    except ApiError as error:
        raise in_our_words(error) from None


@gateway_view({"GET": Permission.INFER, "DELETE": Permission.INFER, "POST": Permission.INFER})
async def not_kept(request: GatewayRequest, response_id: str, rest: str = "") -> HttpResponseBase:
    """Refuse to fetch a response by its id: none is kept."""
    if response_id in _OPENAIS_OWN and request.http.method == "POST":
        raise NotFound(
            f"There is no POST /v1/responses/{response_id}: {_OPENAIS_OWN[response_id]}",
            code="unknown_url",
        )
    raise NotFound(
        f"Response with id '{response_id[:100]}' not found: responses are not kept. Send the "
        "conversation again, as the items of `input`."
    )


#: OpenAI's addresses that look like ids, and what to do instead.
_OPENAIS_OWN = {
    "input_tokens": "to count tokens, send the request to POST /v1/responses with "
    "max_output_tokens 1 and read usage.input_tokens.",
    "compact": "conversations are the client's here; truncation auto drops the oldest turns.",
}


async def _bodies(request: GatewayRequest) -> tuple[ResponsesBody, ChatBody]:
    """Read the body, and the chat that it stands for."""

    def both(sent: bytes) -> tuple[ResponsesBody, ChatBody]:
        body = parse_body(ResponsesBody, sent)
        return body, chat_body(body)

    return await request.parse(both)
