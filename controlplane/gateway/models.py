"""/v1/models: what the caller may put in `model`.

Answers are kept by key and address, for while the database is away.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, ClassVar

from django.http import HttpResponse, HttpResponseBase
from drf_spectacular.utils import extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters.resolution import ResolvedModel
from controlplane.adapters.services import model_delete
from controlplane.aliases.protection import check_no_alias
from controlplane.aliases.resolution import models_list
from controlplane.errors import Unavailable
from controlplane.gateway.door import GatewayRequest
from controlplane.gateway.rest.fields import Constant
from controlplane.gateway.row_views import GatewayAPIView
from controlplane.inference import access
from controlplane.inference.model_selector import ModelSelector
from controlplane.queue.workers import precisions, workers
from controlplane.tenancy import epochs
from controlplane.tenancy.lookup import Lookup
from controlplane.tenants.auth import Permission

#: Answers by key and address. None is fresh: they are for while the database is away.
_answers: Lookup[tuple[uuid.UUID, str], bytes] = Lookup(
    fresh_s=0, max_entries=100_000, max_bytes=16 * 1024**2, num_bytes=len
)


@extend_schema_serializer(component_name="Model")
class ServedModelSerializer(serializers.Serializer[ResolvedModel]):
    """A model, as OpenAI writes it; from `root` on as vLLM does."""

    id = serializers.CharField(source="name")
    object = Constant("model")
    created = serializers.IntegerField(help_text="Seconds since 1970.")
    owned_by = serializers.SerializerMethodField()
    parent = serializers.SerializerMethodField(  # type: ignore[assignment]
        help_text="An adapter's base model."
    )
    root = serializers.CharField(  # type: ignore[assignment]
        source="base_model.name", help_text="The base model, whose tokenizer it is."
    )
    max_model_len = serializers.IntegerField(
        source="base_model.context_length", help_text="Tokens of its context."
    )
    precision = serializers.SerializerMethodField(
        help_text="Of the base's `weights`, of keys and values (`kv`) and of `adapters`, on the "
        "workers that are ready, each once: as `fp8`, `int4`, `bfloat16`."
    )
    version = serializers.SerializerMethodField(help_text="Of the adapter; null for a blend.")
    deprecated_at = serializers.DateTimeField(
        allow_null=True, help_text="Its version is deprecated since then; it answers as before."
    )
    shutdown_date = serializers.DateField(
        allow_null=True,
        help_text="From the beginning of this day (UTC) it is refused.",
    )

    def get_owned_by(self, model: ResolvedModel) -> str:
        return "lorikeet" if model.is_base else "tenant"

    def get_parent(self, model: ResolvedModel) -> str | None:
        return None if model.is_base else model.base_model.name

    def get_precision(self, model: ResolvedModel) -> list[dict[str, str]]:
        beats = self.context.get("beats", ())
        return precisions(beat for beat in beats if beat.base_model == model.base_model.name)

    def get_version(self, model: ResolvedModel) -> int | None:
        return None if model.version is None else model.version.number


class ModelListSerializer(serializers.Serializer[Any]):
    object = Constant("list")
    data = ServedModelSerializer(many=True)  # type: ignore[assignment]


def _context() -> dict[str, Any]:
    """Return what workers that are ready tell of themselves; nothing while Redis is away."""
    try:
        return {"beats": [worker.heartbeat for worker in workers() if worker.is_ready]}
    except Unavailable:
        return {}


class ModelDeletedSerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    object = Constant("model")
    deleted = Constant(True)


class _ReadAwayView(GatewayAPIView):
    """Answers GET with what it answered before, while the database is away."""

    @classmethod
    async def answered(
        cls, request: GatewayRequest, work: Callable[[], HttpResponseBase]
    ) -> HttpResponseBase:
        api_key = request.principal.api_key
        if request.http.method != "GET" or api_key is None:
            return await super().answered(request, work)
        key = (api_key.id, request.http.path)

        def ask() -> HttpResponseBase:
            asked = epochs.stamp()
            response = work()
            if isinstance(response, HttpResponse) and response.status_code == 200:
                _answers.put(key, response.content, asked, request.principal.tenant.id)
            return response

        return await _answers.find(
            [key], lambda found: HttpResponse(found[0], content_type="application/json"), ask
        )


class ModelsView(_ReadAwayView):
    permissions: ClassVar = {"GET": Permission.INFER}

    @extend_schema("gateway_models", responses=ModelListSerializer)
    def get(self, request: Request) -> Response:
        """List the models that the key may use."""
        models = [model for model in models_list() if access.may_name(self.principal, model.name)]
        return Response(ModelListSerializer({"data": models}, context=_context()).data)


class ModelView(_ReadAwayView):
    permissions: ClassVar = {"GET": Permission.INFER, "DELETE": Permission.ADAPTERS_WRITE}

    @extend_schema("gateway_model", responses=ServedModelSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return one model."""
        caller = access.resolve_now(self.principal, ModelSelector.model(name))
        return Response(ServedModelSerializer(caller.model.models[0], context=_context()).data)

    @extend_schema("gateway_model_delete", responses={200: ModelDeletedSerializer})
    def delete(self, request: Request, name: str) -> Response:
        """Retire an adapter, or one version of it."""
        access.check_named(self.principal, name)
        check_no_alias(name)
        model_delete(name)
        return Response(ModelDeletedSerializer({"id": name}).data)
