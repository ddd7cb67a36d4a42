"""/v1/models: what the caller may put in `model`."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema, extend_schema_serializer
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters.resolution import ResolvedModel, models_list
from controlplane.adapters.services import model_delete
from controlplane.gateway.row_views import GatewayAPIView
from controlplane.inference import access
from controlplane.inference.model_selector import ModelSelector
from controlplane.rest.fields import Constant
from controlplane.tenants.auth import Permission


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
    version = serializers.SerializerMethodField(help_text="Of the adapter.")
    shutdown_date = serializers.DateField(
        source="base_model.shutdown_date",
        allow_null=True,
        help_text="From the beginning of this day (UTC) it is refused.",
    )

    def get_owned_by(self, model: ResolvedModel) -> str:
        return "lorikeet" if model.version is None else "tenant"

    def get_parent(self, model: ResolvedModel) -> str | None:
        return None if model.version is None else model.base_model.name

    def get_version(self, model: ResolvedModel) -> int | None:
        return None if model.version is None else model.version.number


class ModelListSerializer(serializers.Serializer[Any]):
    object = Constant("list")
    data = ServedModelSerializer(many=True)  # type: ignore[assignment]


class ModelDeletedSerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    object = Constant("model")
    deleted = Constant(True)


class ModelsView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.INFER}

    @extend_schema("gateway_models", responses=ModelListSerializer)
    def get(self, request: Request) -> Response:
        """List the models that the key may use."""
        models = [model for model in models_list() if access.may_name(self.principal, model.name)]
        return Response(ModelListSerializer({"data": models}).data)


class ModelView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.INFER, "DELETE": Permission.ADAPTERS_WRITE}

    @extend_schema("gateway_model", responses=ServedModelSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return one model."""
        caller = access.resolve_now(self.principal, ModelSelector.model(name))
        return Response(ServedModelSerializer(caller.model.models[0]).data)

    @extend_schema("gateway_model_delete", responses={200: ModelDeletedSerializer})
    def delete(self, request: Request, name: str) -> Response:
        """Retire an adapter, or one version of it."""
        access.check_named(self.principal, name)
        model_delete(name)
        return Response(ModelDeletedSerializer({"id": name}).data)
