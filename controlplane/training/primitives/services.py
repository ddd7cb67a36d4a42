"""Training clients for the gateway: it makes and finds them, and queues their calls."""

from __future__ import annotations

import datetime as dt
import re
import secrets
from typing import Any

from celery import signature
from django.utils import timezone
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from contract.training.job import RANGES
from controlplane.adapters.models import BaseModel, is_serving
from controlplane.errors import InvalidRequest, NotFound, RateLimited, require
from controlplane.tenancy.model_scope import check_named
from controlplane.tenancy.scoping import current_tenant_id
from controlplane.tenants.models import SLUG_RULE, is_slug
from controlplane.training.primitives import calls
from controlplane.training.primitives.calls import Call
from controlplane.training.primitives.models import ClientState, TrainingClient
from controlplane.training.runs import picking, sending
from controlplane.usage.limits import quotas

#: The name of the task that trains; its module imports this one.
TRAIN_TASK = "controlplane.training.primitives.tasks.clients_train"
#: Clients of a tenant that were used in the last day.
MAX_CLIENTS = 200
#: Strength of a new adapter, `alpha` / rank, as Tinker has it.
ALPHA = 32.0
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_PATH = re.compile(r"tinker://([^/]{1,100})/(weights|sampler_weights)/([^/]{1,128})")


def base_model_find(name: str) -> BaseModel:
    """Return the base model of this name, or known by it. Raises InvalidRequest."""
    serving = BaseModel.objects.filter(is_serving())
    found = serving.filter(name=name[:64]).first()
    found = found or serving.filter(known_names__contains=[name]).first()
    if found is None:
        names = ", ".join(serving.order_by("name").values_list("name", flat=True)[:20])
        raise InvalidRequest(
            f"There is no such base model; available: {names}.", param="base_model"
        )
    return found


def client_create(
    *,
    model_id: str,
    base_model: str,
    adapter: str | None,
    rank: int,
    seed: int | None,
    train_attn: bool,
    train_mlp: bool,
) -> TrainingClient:
    """Make a client; a repeated call returns the same. Raises InvalidRequest, RateLimited."""
    if not RANGES["rank"].has(rank):
        raise InvalidRequest(f"rank must be {RANGES['rank']}.", param="lora_config.rank")
    targets = [*(_ATTENTION if train_attn else ()), *(_MLP if train_mlp else ())]
    if not targets:
        raise InvalidRequest(
            "The unembedding is not trained here: set train_attn or train_mlp.",
            param="lora_config",
        )
    settings = {
        "rank": rank,
        "alpha": ALPHA,
        "seed": secrets.randbits(31) if seed is None else seed % 2**31,
        "target_modules": targets,
    }
    return _create(model_id, base_model_find(base_model), adapter, settings)


def client_create_from(*, model_id: str, state: ClientState, adapter: str | None) -> TrainingClient:
    """Make a client that can load a state; a repeated call returns the same."""
    source = state.client
    return _create(model_id, source.base_model, adapter, source.settings)


def _create(
    model_id: str, base_model: BaseModel, adapter: str | None, settings: dict[str, Any]
) -> TrainingClient:
    name = adapter or f"tinker-{secrets.token_hex(4)}"
    if not is_slug(name):
        raise InvalidRequest(SLUG_RULE, param="user_metadata.adapter")
    check_named(name, "user_metadata.adapter")
    if (known := TrainingClient.objects.filter(model_id=model_id).first()) is not None:
        return known
    since = timezone.now() - dt.timedelta(days=1)
    if TrainingClient.objects.filter(used_at__gt=since).count() >= MAX_CLIENTS:
        raise RateLimited(
            f"Your organization may use {MAX_CLIENTS} training clients in 24 hours.",
            code="too_many_training_clients",
            retry_after_s=3600,
        )
    said = {"base_model": base_model, "adapter_name": name, "settings": settings}
    return TrainingClient.objects.get_or_create(model_id=model_id, defaults=said)[0]


def client_get(model_id: str) -> TrainingClient:
    """Return the tenant's client of this id. Raises NotFound."""
    rows = TrainingClient.objects.allowed().select_related("base_model")
    return require(rows.filter(model_id=model_id[:100]).first(), "There is no such model.")


def state_get(path: str, kind: ClientState.Kind) -> ClientState:
    """Return the tenant's state of this path. Raises NotFound, InvalidRequest for another kind."""
    match = _PATH.fullmatch(path)
    if match is None or match[2] != kind:
        example = f"tinker://MODEL_ID/{kind}/NAME"
        raise InvalidRequest(f"The path must be as {example}.", param="path")
    rows = ClientState.objects.allowed().select_related("client__base_model", "version__adapter")
    found = rows.filter(client__model_id=match[1], kind=kind, name=match[3]).first()
    if found is None or (found.expires_at is not None and found.expires_at < timezone.now()):
        raise NotFound("There is no such state.", param="path")
    return found


def call_send(client: TrainingClient, number: int, kind: str, said: Any, body: bytes = b"") -> str:
    """Queue a client's call. -> its id. Raises RateLimited, Unavailable."""
    used, most = picking.device_seconds_used(), quotas.allowed("training_device_seconds")
    if used >= most:
        raise RateLimited(
            f"Your organization's trainings used their {most} seconds of the last 24 hours.",
            code="device_seconds_used_up",
            retry_after_s=3600,
        )
    call = Call(
        id=f"{client.model_id}:{number}",
        tenant_id=current_tenant_id(),
        base_id=client.base_model_id,
        client_id=client.pk,
        kind=kind,
        said=said,
        body=body,
    )
    calls.enqueue(call)
    trainer_want(client)
    return call.id


def trainer_want(client: TrainingClient) -> None:
    """Send a message for a trainer if there is none; if that fails, the next poll does."""
    if picking.window_opens_at() is not None or not calls.wants_trainer(client.base_model_id):
        return
    try:
        if sending.num_waiting() < sending.MAX_WAITING:
            signature(TRAIN_TASK).delay(str(client.base_model_id))
    except (OperationalError, RedisError):
        return
