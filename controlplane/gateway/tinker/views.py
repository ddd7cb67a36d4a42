"""Tinker's addresses.

Its client sends the key in X-API-Key, behind `tml-`. A call that takes time is answered with a
future, which the client polls. Ids of sessions are made here and kept nowhere: a client's models
and futures are found by the tenant of its key.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from django.http import HttpResponse, HttpResponseBase, JsonResponse

from controlplane.adapters.models import BaseModel, is_serving
from controlplane.errors import ApiError, InvalidRequest
from controlplane.gateway.door import GatewayRequest, gateway_view
from controlplane.gateway.tinker import bodies, sampling, wire
from controlplane.inference import access
from controlplane.inference.model_selector import ModelSelector
from controlplane.inference.parsing import parse_body
from controlplane.infra.web.threads import query_in_thread
from controlplane.tenancy.scoping import new_id
from controlplane.tenants.permissions import Permission
from controlplane.training.primitives import calls, services
from controlplane.training.primitives.calls import Result
from controlplane.training.primitives.models import ClientState, TrainingClient

#: Seconds that a poll waits for a result, and between two messages for a trainer.
_POLL_S, _WANT_S = 20.0, 5.0
#: The client's settings: what it may send at a time, and by which transport.
_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 256,
    "fwdbwd_max_chunk_bytes_count": 1_000_000,
    "sample_max_concurrent_requests": 64,
    "use_pyqwest_transport": False,
}
_PROTOBUF = "application/x-protobuf"


def _refused(error: ApiError) -> HttpResponseBase:
    """Return an error's answer, with its length: a 400 without one is sent again by the client."""
    response = error.response()
    response["Content-Length"] = str(len(response.content))
    return response


_samples = gateway_view({"POST": Permission.INFER}, errors=_refused)
_trains = gateway_view({"POST": Permission.TRAINING_WRITE}, errors=_refused)
_reads = gateway_view({"GET": Permission.INFER}, errors=_refused)
_Kind = ClientState.Kind


class FutureGone(ApiError):
    """There is no such future, or its process ended: the client may send the call again."""

    status, type, code = 410, "invalid_request_error", "future_gone"


@_samples
async def config(request: GatewayRequest) -> HttpResponseBase:
    return JsonResponse(_CONFIG)


@_samples
async def dynamic_config(request: GatewayRequest) -> HttpResponseBase:
    return JsonResponse({})


@_samples
async def telemetry(request: GatewayRequest) -> HttpResponseBase:
    """Take what the client tells its maker, and keep nothing of it."""
    return JsonResponse({"status": "accepted"})


@_samples
async def create_session(request: GatewayRequest) -> HttpResponseBase:
    await request.parse(lambda sent: parse_body(bodies.CreateSession, sent))
    told = "Here no unembedding is trained, whatever train_unembed says."
    return JsonResponse(
        {"type": "create_session", "session_id": f"tks-{new_id().hex}", "info_message": told}
    )


@_samples
async def session_heartbeat(request: GatewayRequest) -> HttpResponseBase:
    return JsonResponse({"type": "session_heartbeat"})


@_samples
async def session_finish(request: GatewayRequest, session_id: str) -> HttpResponseBase:
    return HttpResponse(status=204)


@_reads
async def capabilities(request: GatewayRequest) -> HttpResponseBase:
    def read() -> list[BaseModel]:
        return list(BaseModel.objects.filter(is_serving()).order_by("name")[:100])

    models = [
        {
            "model_name": base.name,
            "max_context_length": base.context_length,
            "trainable": True,
            "sampleable": True,
        }
        for base in await query_in_thread(read)
    ]
    return JsonResponse({"supported_models": models})


@_trains
async def create_model(request: GatewayRequest) -> HttpResponseBase:
    body = await request.parse(lambda sent: parse_body(bodies.CreateModel, sent))
    lora, metadata = body.lora_config, body.user_metadata or {}

    def create() -> dict[str, Any]:
        client = services.client_create(
            model_id=f"{body.session_id}:train:{body.model_seq_id}",
            base_model=body.base_model,
            adapter=_adapter(metadata),
            rank=lora.rank,
            seed=lora.seed,
            train_attn=lora.train_attn,
            train_mlp=lora.train_mlp,
        )
        return _sent(client, 0, "create", {})

    return await _future(request, create)


def _adapter(metadata: dict[str, Any]) -> str | None:
    """Return the name of the adapter whose versions the client makes."""
    name = metadata.get("adapter")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest("It must be an adapter's name.", param="user_metadata.adapter")
    return name


def _sent(
    client: TrainingClient, number: int, kind: str, said: Any, sent: bytes = b""
) -> dict[str, Any]:
    """Queue a client's call. -> the client's future."""
    call_id = services.call_send(client, number, kind, said, sent)
    return {"request_id": call_id, "model_id": client.model_id}


async def _future(request: GatewayRequest, send: Callable[[], dict[str, Any]]) -> HttpResponseBase:
    return JsonResponse(await query_in_thread(request.as_caller(send)))


@_trains
async def get_info(request: GatewayRequest) -> HttpResponseBase:
    body = await request.parse(lambda sent: parse_body(bodies.GetInfo, sent))

    def read() -> dict[str, Any]:
        client = services.client_get(body.model_id)
        base = client.base_model
        hub = next((name for name in base.known_names if "/" in name), base.name)
        return {
            "type": "get_info",
            "model_data": {
                "arch": str(base.config.get("model_type")),
                "model_name": base.name,
                "tokenizer_id": hub,
            },
            "model_id": client.model_id,
            "is_lora": True,
            "lora_rank": client.settings["rank"],
            "model_name": base.name,
        }

    return await _future(request, read)


@_trains
async def forward_backward(request: GatewayRequest) -> HttpResponseBase:
    if request.http.content_type != _PROTOBUF:
        raise InvalidRequest(f"The body must be {_PROTOBUF}.")

    def read(sent: bytes) -> tuple[wire.SentPass, bytes, list[int]]:
        found = wire.read_pass(sent)
        rows = found.pass_rows()
        return found, rows.encode(), list(rows.lengths)

    found, encoded, lengths = await request.parse(read)
    kind = "forward" if found.is_forward else "forward_backward"

    def send() -> dict[str, Any]:
        client = services.client_get(found.model_id)
        return _sent(client, found.seq_id, kind, {"lengths": lengths}, encoded)

    return await _future(request, send)


@_trains
async def optim_step(request: GatewayRequest) -> HttpResponseBase:
    body = await request.parse(lambda sent: parse_body(bodies.OptimStep, sent))
    adam = body.adam_params.model_dump()
    adam["lr"], adam["max_norm"] = adam.pop("learning_rate"), adam.pop("grad_clip_norm")

    def send() -> dict[str, Any]:
        return _sent(services.client_get(body.model_id), body.seq_id, "optim_step", adam)

    return await _future(request, send)


@_trains
async def save_weights(request: GatewayRequest) -> HttpResponseBase:
    body = await request.parse(lambda sent: parse_body(bodies.SaveWeights, sent))
    said = {
        "name": body.path or f"state-{body.seq_id}",
        "overwrite": body.overwrite,
        "ttl_seconds": body.ttl_seconds,
    }

    def send() -> dict[str, Any]:
        return _sent(services.client_get(body.model_id), body.seq_id, "save", said)

    return await _future(request, send)


@_trains
async def save_weights_for_sampler(request: GatewayRequest) -> HttpResponseBase:
    body = await request.parse(lambda sent: parse_body(bodies.SaveForSampler, sent))

    def send() -> dict[str, Any]:
        client = services.client_get(body.model_id)
        session = client.model_id.partition(":")[0]
        said = {
            "name": body.path,
            "session": f"{session}:sample:{body.sampling_session_seq_id or 0}",
            "ttl_seconds": body.ttl_seconds,
        }
        return _sent(client, body.seq_id, "sampler", said)

    return await _future(request, send)


@_trains
async def load_weights(request: GatewayRequest) -> HttpResponseBase:
    """Load a state into a client, which its session and number make if there is none yet."""
    body = await request.parse(lambda sent: parse_body(bodies.LoadWeights, sent))

    def send() -> dict[str, Any]:
        state = services.state_get(body.path, _Kind.WEIGHTS)
        said = {"state": str(state.pk), "optimizer": body.optimizer}
        if body.model_id is not None and body.seq_id is not None:
            return _sent(services.client_get(body.model_id), body.seq_id, "load", said)
        if body.session_id is None or body.model_seq_id is None:
            raise InvalidRequest("It is required, with model_seq_id.", param="session_id")
        if body.base_model is not None:
            base = services.base_model_find(body.base_model)
            if base.pk != state.client.base_model_id:
                raise InvalidRequest("The state is of another base model.", param="base_model")
        client = services.client_create_from(
            model_id=f"{body.session_id}:train:{body.model_seq_id}",
            state=state,
            adapter=_adapter(body.user_metadata or {}),
        )
        return _sent(client, 0, "load", said)

    return await _future(request, send)


@_samples
async def create_sampling_session(request: GatewayRequest) -> HttpResponseBase:
    body = await request.parse(lambda sent: parse_body(bodies.CreateSamplingSession, sent))

    def name() -> str:
        if body.model_path is not None:
            version = services.state_get(body.model_path, _Kind.SAMPLER).version
            assert version is not None
            return f"{version.adapter.name}@{version.number}"
        if body.base_model is None:
            raise InvalidRequest("It is required, or model_path.", param="base_model")
        return services.base_model_find(body.base_model).name

    model = await query_in_thread(request.as_caller(name))
    sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}:{model}"
    return JsonResponse({"type": "create_sampling_session", "sampling_session_id": sampler})


@_reads
async def sampler(request: GatewayRequest, sampler_id: str) -> HttpResponseBase:
    selector = ModelSelector.model(sampling.model_of(sampler_id))
    caller = await access.resolve(request.principal, selector)
    return JsonResponse({"sampler_id": sampler_id, "base_model": caller.model.base_model.name})


@_samples
async def asample(request: GatewayRequest) -> HttpResponseBase:
    body = await request.parse(lambda sent: parse_body(bodies.Sample, sent))
    return JsonResponse(await sampling.sample(request, body))


@_samples
async def retrieve_future(request: GatewayRequest) -> HttpResponseBase:
    """Answer with a call's result, or after a while that there is none yet."""
    body = await request.parse(lambda sent: parse_body(bodies.RetrieveFuture, sent))
    call_id, tenant_id = body.request_id, request.principal.tenant.id
    client = None
    if ":train:" in call_id:
        model_id = call_id.rpartition(":")[0]
        find = request.as_caller(lambda: services.client_get(model_id))
        client = await query_in_thread(find)
    until, wanted_at, pause_s = time.monotonic() + _POLL_S, 0.0, 0.02
    while True:
        found = await asyncio.to_thread(calls.find, tenant_id, call_id)
        if found is None:
            raise FutureGone("There is no such future, or not any more. Send the call again.")
        kind, result = found
        if result is not None:
            return _answered(kind, result)
        now = time.monotonic()
        if now >= until:
            state = "active"
            if client is not None:
                has_one = await asyncio.to_thread(calls.has_trainer, client.base_model_id)
                state = "active" if has_one else "paused_capacity"
            told = {"type": "try_again", "request_id": call_id, "queue_state": state}
            return JsonResponse(told)
        if client is not None and now >= wanted_at:
            wanted_at = now + _WANT_S
            await asyncio.to_thread(services.trainer_want, client)
        await asyncio.sleep(pause_s)
        pause_s = min(0.25, 1.3 * pause_s)


def _answered(kind: str, result: Result) -> HttpResponseBase:
    """Return a result as the client reads it."""
    if "error" in result.said:
        return JsonResponse(result.said)
    if kind == "sample":
        return HttpResponse(result.out, content_type=_PROTOBUF)
    if kind in ("forward", "forward_backward"):
        written = wire.write_passed(result.said["lengths"], result.out, result.said["metrics"])
        return HttpResponse(written, content_type=_PROTOBUF)
    return JsonResponse(result.said)
