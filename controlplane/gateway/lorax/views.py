"""LoRAX's addresses: what its clients expect behind a base URL, under a tenant's key.

lorax-client posts to the base URL itself; /generate and /generate_stream are for everybody else.
"""

from __future__ import annotations

import time
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.shortcuts import redirect

from contract.messages.protocol import Usage
from controlplane.errors import ApiError, InvalidRequest
from controlplane.gateway.door import GatewayRequest, gateway_view
from controlplane.gateway.event_stream import streamed
from controlplane.gateway.lorax import translation
from controlplane.gateway.lorax.answers import LoraxAnswer, sse
from controlplane.gateway.lorax.errors import error_body, error_response
from controlplane.gateway.lorax.schemas import MAX_BEST_OF, ClassifyBody, GenerateBody
from controlplane.gateway.lorax.timings import Timings, whole_headers
from controlplane.inference import default_base
from controlplane.inference.parsing import parse_body
from controlplane.inference.service import Generation
from controlplane.queue.dispatcher import get_dispatcher
from controlplane.tenants.permissions import Permission
from controlplane.usage.limits.admit import MAX_WAITING

_lorax_view = gateway_view({"POST": Permission.INFER}, errors=error_response)


async def root(request: HttpRequest) -> HttpResponseBase:
    """Answer GET with the console, and POST as a LoRAX client's base URL."""
    if request.method == "POST":
        return await generate_compat(request)
    return redirect("console:overview")


@_lorax_view
async def generate_compat(request: GatewayRequest) -> HttpResponseBase:
    """Answer with a stream, or with a list of one answer."""
    body = await _body(request)
    if body.stream:
        return await _streamed(request, body)
    answer, headers = await _whole(request, body)
    return JsonResponse([answer], safe=False, headers=headers)


@_lorax_view
async def generate(request: GatewayRequest) -> HttpResponseBase:
    answer, headers = await _whole(request, await _body(request))
    return JsonResponse(answer, headers=headers)


@_lorax_view
async def generate_stream(request: GatewayRequest) -> HttpResponseBase:
    return await _streamed(request, await _body(request))


@gateway_view({"GET": Permission.INFER}, errors=error_response)
async def info(request: GatewayRequest) -> HttpResponseBase:
    """Tell callers with a key the base model and the bounds of a request."""
    base = await default_base.default_base()
    dispatcher = await get_dispatcher()
    context = base.context_length
    return JsonResponse(
        {
            "model_id": base.name,
            "model_sha": base.revision,
            "model_dtype": str(base.config.get("dtype") or base.config.get("torch_dtype")),
            "model_device_type": min(dispatcher.workers.devices(base.name), default="cpu"),
            "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": MAX_WAITING,
            "max_best_of": MAX_BEST_OF,
            "max_stop_sequences": 4,
            "max_input_length": max(0, context - 1),
            "max_total_tokens": context,
            "waiting_served_ratio": 0.0,
            "max_batch_total_tokens": context,
            "max_waiting_tokens": 0,
            "validation_workers": 1,
            "version": "lorikeet",
            "sha": None,
            "docker_label": None,
            "request_logger_url": None,
        }
    )


@gateway_view({"GET": None, "HEAD": None}, errors=error_response)
async def health(request: GatewayRequest) -> HttpResponseBase:
    """Answer whether a worker would take a request; without a key, for load balancers."""
    dispatcher = await get_dispatcher()
    if await dispatcher.workers.served_models():
        return HttpResponse()
    return JsonResponse({"error": "unhealthy", "error_type": "healthcheck"}, status=503)


@_lorax_view
async def classify(request: GatewayRequest) -> HttpResponseBase:
    """Answer with the labels' scores of one text, or with a list of them for each of several."""
    body = await request.parse(lambda sent: parse_body(ClassifyBody, sent))
    endpoint = f"/{request.http.path.lstrip('/')}"
    generation = await request.admit(translation.labels_body(body), endpoint=endpoint)
    try:
        labels = (await generation.whole())["labels"]
    finally:
        generation.leave()
    return JsonResponse(labels[0] if isinstance(body.inputs, str) else labels, safe=False)


@gateway_view({"POST": Permission.INFER}, errors=error_response)
async def embed(request: GatewayRequest) -> HttpResponseBase:
    """Refuse LoRAX's own embeddings."""
    raise InvalidRequest("/embed is not supported: send the text to /v1/embeddings.")


async def _body(request: GatewayRequest) -> GenerateBody:
    return await request.parse(lambda sent: parse_body(GenerateBody, sent))


async def _submitted(
    request: GatewayRequest, body: GenerateBody, *, stream: bool
) -> tuple[Generation, LoraxAnswer]:
    parameters = body.parameters
    base = await default_base.default_base() if _needs_base(body) else None
    seed = translation.seed_of(parameters)
    chat = translation.chat_body(
        body, base_model="" if base is None else base.name, seed=seed, stream=stream
    )
    try:
        generation = await request.admit(
            chat,
            endpoint=f"/{request.http.path.lstrip('/')}",
            adjust=translation.as_raw_text(body),
        )
    except ApiError as error:
        raise translation.in_our_words(error, parameters) from None
    answer = LoraxAnswer(
        prompt=body.inputs if parameters.return_full_text else "",
        with_details=parameters.details,
        with_alternatives=parameters.return_k_alternatives is not None,
        seed=seed,
        eos_token_id=default_base.eos_token_id(generation.model.base_model),
    )
    return generation, answer


def _needs_base(body: GenerateBody) -> bool:
    parameters = body.parameters
    names_one = parameters.adapter_id not in (None, *translation.NO_ADAPTER)
    return not names_one and parameters.merged_adapters is None


async def _whole(request: GatewayRequest, body: GenerateBody) -> tuple[Any, dict[str, str]]:
    started = time.perf_counter()
    generation, answer = await _submitted(request, body, stream=False)
    submitted = time.perf_counter()
    try:
        events = [event async for event in generation.events()]
    finally:
        generation.leave()
    usage = events[-1].usage or Usage()
    timings = Timings(
        total_ms=(time.perf_counter() - started) * 1000,
        validation_ms=(submitted - started) * 1000,
        queue_ms=events[-1].queue_ms or 0.0,
    )
    headers = await _headers(generation, body) | whole_headers(usage, timings)
    return answer.whole(events, usage), headers


async def _streamed(request: GatewayRequest, body: GenerateBody) -> HttpResponseBase:
    if (body.parameters.best_of or 1) > 1:
        raise InvalidRequest("best_of above 1 is not supported when streaming tokens.")
    generation, answer = await _submitted(request, body, stream=True)
    response = await streamed(generation, answer, failure=lambda error: sse(error_body(error)))
    for name, value in (await _headers(generation, body)).items():
        response[name] = value
    return response


async def _headers(generation: Generation, body: GenerateBody) -> dict[str, str]:
    """Return the headers that whole answers and streams have in common."""
    base = generation.model.base_model.name
    devices = (await get_dispatcher()).workers.devices(base)
    headers = {
        "x-model-id": base,
        "x-compute-type": f"{'gpu' if set(devices) - {'cpu'} else 'cpu'}+optimized",
        "x-compute-characters": str(len(body.inputs)),
    }
    adapters = [model.name for model in generation.model.models if model.version is not None]
    if adapters:
        headers["x-adapter-id"] = ",".join(adapters)
        headers["x-adapter-source"] = "local"
    return headers
