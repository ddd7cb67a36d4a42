"""/api/v1/adapters and /api/v1/base-models."""

from __future__ import annotations

import dataclasses
import datetime as dt
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters import probing, promotion, retirement, services, uploads
from controlplane.adapters.models import (
    Adapter,
    AdapterVersion,
    BaseModel,
    Promotion,
    is_serving,
)
from controlplane.deletion import services as deletion
from controlplane.evaluations.gate_policy import gate_policy
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.adapters.adapter_uploads import AdapterUploadSerializer
from controlplane.management.adapters.inspections import LARGE, PROBE_HELP, probe_of
from controlplane.management.base import FORCE, StrictSerializer, TenantAPIView, is_forced
from controlplane.management.fields import ChoiceField
from controlplane.management.residency import PrefetchedSerializer
from controlplane.queue.placement.residency import Prefetched, before_switch
from controlplane.tenants.auth import Permission, authorize


class BaseModelSerializer(serializers.ModelSerializer[BaseModel]):
    object = serializers.CharField(default="base_model", read_only=True)

    class Meta:
        model = BaseModel
        fields = (
            "id", "object", "name", "revision", "context_length", "max_rank",
            "shutdown_date", "created_at",
        )  # fmt: skip


def _policy_field(**options: Any) -> ChoiceField:
    return ChoiceField(
        Adapter.PromotionPolicy.choices,
        required=False,
        help_text="The rule for a version that becomes ready while another one is live: with "
        "`hold` it waits until somebody makes it live.",
        **options,
    )


class AdapterSerializer(serializers.ModelSerializer[Adapter]):
    object = serializers.CharField(default="adapter", read_only=True)
    base_model = serializers.CharField(source="base_model.name")
    live_version = serializers.IntegerField(
        source="live_version.number",
        default=None,
        allow_null=True,
        help_text="The version that the name without a number means; null until one is ready.",
    )

    shutdown_date = serializers.DateField(
        source="base_model.shutdown_date",
        allow_null=True,
        help_text="The base model's shutdown date: from this day (UTC) requests are refused.",
    )

    gate = serializers.DictField(help_text="Settings of the policy `gate`; empty: no suite.")

    class Meta:
        model = Adapter
        fields = (
            "id", "object", "name", "base_model", "description", "live_version",
            "promotion_policy", "gate", "shutdown_date", "created_at",
        )  # fmt: skip


class AdapterCreateSerializer(StrictSerializer):
    name = serializers.CharField(max_length=63)
    base_model = serializers.CharField(
        required=False, help_text="Optional when there is only one base model."
    )
    description = serializers.CharField(required=False, default="", max_length=500)
    promotion_policy = _policy_field(default=Adapter.PromotionPolicy.HOLD.value)


class AdapterChangeSerializer(StrictSerializer):
    promotion_policy = _policy_field()
    gate = serializers.DictField(
        required=False,
        help_text="Settings of the policy `gate`: `suite`, `on_pass` (promote, canary, hold), the "
        "drops that matter: docs/evaluation.md. With a suite the policy `hold` becomes `gate`.",
    )


class PromoteSerializer(StrictSerializer):
    reason = serializers.CharField(
        required=False,
        default="",
        allow_blank=True,
        max_length=promotion.MAX_REASON_CHARS,
        help_text="The reason, which the history shows.",
    )


class SwitchedSerializer(AdapterSerializer):
    prefetched = PrefetchedSerializer(
        allow_null=True,
        help_text="The workers that had the version on the GPU before it became live; null if it "
        "was live already.",
    )

    class Meta(AdapterSerializer.Meta):
        fields = (*AdapterSerializer.Meta.fields, "prefetched")  # type: ignore[assignment]


def _switched(adapter: Adapter, prefetched: Prefetched | None) -> Response:
    told = None if prefetched is None else dataclasses.asdict(prefetched)
    return Response({**AdapterSerializer(adapter).data, "prefetched": told})


class PromotionSerializer(serializers.ModelSerializer[Promotion]):
    object = serializers.CharField(default="promotion", read_only=True)
    adapter = serializers.CharField(source="adapter.name")
    version = serializers.IntegerField(
        source="number", allow_null=True, help_text="The version that was live from then on."
    )
    previous_version = serializers.IntegerField(
        source="previous_number", allow_null=True, help_text="The version that was live before."
    )

    class Meta:
        model = Promotion
        fields = (
            "id", "object", "adapter", "version", "previous_version", "cause", "reason",
            "actor_type", "actor_name", "created_at",
        )  # fmt: skip


class ReasonSerializer(serializers.Serializer[dict[str, str]]):
    field = serializers.CharField(help_text="A file, a field of the config, or a tensor's name.")  # type: ignore[assignment]
    message = serializers.CharField()


ORIGINAL_HELP = (
    "Whether workers that keep adapters in FP8 answer with the version as it is stored, even where "
    "its copy would do."
)


class VersionSerializer(serializers.ModelSerializer[AdapterVersion]):
    object = serializers.CharField(default="adapter_version", read_only=True)
    adapter = serializers.CharField(source="adapter.name")
    model = serializers.SerializerMethodField(help_text="The name that requests put in `model`.")
    reasons = ReasonSerializer(many=True, help_text="The reasons of its rejection.")
    report = serializers.DictField(help_text="Facts from the check of the files.")
    origin = serializers.DictField(
        child=serializers.CharField(),
        help_text="An import's `host`; from the Hub also `repository`, `revision` and the fetched "
        "`commit`. Otherwise empty.",
    )
    files_until = serializers.SerializerMethodField(
        help_text="Until when a retired version can be made ready again; null for others."
    )
    probe = serializers.SerializerMethodField(help_text=PROBE_HELP)
    keeps_original = serializers.BooleanField(help_text=ORIGINAL_HELP)
    copy_nats = serializers.FloatField(
        allow_null=True,
        help_text="By how many nats a token is further from PEFT's log-probability with its copy "
        "in FP8 than with its original, on average over the probe's prompts; null until then.",
    )
    is_in_fp8 = serializers.BooleanField(
        help_text="Whether workers that keep adapters in FP8 answer with that copy."
    )

    class Meta:
        model = AdapterVersion
        fields = (
            "id", "object", "adapter", "number", "model", "status", "source", "origin",
            "digest", "num_bytes", "max_rank", "reasons", "report", "probe",
            "keeps_original", "copy_nats", "is_in_fp8",
            "created_at", "ready_at",
            "deprecated_at", "shutdown_date", "files_until",
        )  # fmt: skip

    def get_probe(self, version: AdapterVersion) -> dict[str, Any] | None:
        return probe_of(version)

    def get_model(self, version: AdapterVersion) -> str:
        return f"{version.adapter.name}@{version.number}"

    def get_files_until(self, version: AdapterVersion) -> dt.datetime | None:
        return retirement.files_until(version)


class VersionChangeSerializer(StrictSerializer):
    keeps_original = serializers.BooleanField(required=False, help_text=ORIGINAL_HELP)


class VersionCreateSerializer(StrictSerializer):
    files = serializers.DictField(
        child=serializers.IntegerField(),
        help_text="Length in bytes of adapter_config.json and of adapter_model.safetensors.",
    )
    base_model = serializers.CharField(
        required=False, help_text="For a new adapter when there are several base models."
    )
    multipart = serializers.BooleanField(
        required=False,
        default=False,
        help_text="Send the files by parts: `parts` gives a URL for each, and an interrupted "
        "upload can continue.",
    )
    accept_base_mismatch = serializers.BooleanField(
        required=False,
        default=False,
        help_text="Do not reject it when its config names another base model: for the same model "
        "under another name.",
    )


class PresignedUploadSerializer(serializers.Serializer[dict[str, Any]]):
    url = serializers.URLField()
    method = serializers.ChoiceField(["PUT"])
    headers = serializers.DictField(child=serializers.CharField())


class VersionCreatedSerializer(VersionSerializer):
    uploads = serializers.DictField(
        child=PresignedUploadSerializer(), help_text="By file; empty with `multipart`."
    )
    upload = AdapterUploadSerializer(
        allow_null=True, help_text="With `multipart`: the files' parts."
    )

    class Meta(VersionSerializer.Meta):
        fields = (*VersionSerializer.Meta.fields, "uploads", "upload")  # type: ignore[assignment]


class BaseModelsView(TenantAPIView):
    @extend_schema("base_models_list", PAGE_PARAMETERS, responses=page_of(BaseModelSerializer))
    def get(self, request: Request) -> Response:
        """List the base models that adapters can be made for."""
        return page(request, BaseModel.objects.filter(is_serving()), BaseModelSerializer)


class AdaptersView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema("adapters_list", PAGE_PARAMETERS, responses=page_of(AdapterSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's adapters, newest first."""
        rows = Adapter.objects.allowed().select_related("base_model", "live_version")
        return page(request, rows, AdapterSerializer)

    @extend_schema(request=AdapterCreateSerializer, responses={201: AdapterSerializer})
    def post(self, request: Request) -> Response:
        """Make an adapter without versions. An upload of a version makes it, too."""
        body = AdapterCreateSerializer.parsed(request)
        adapter = services.adapter_create(
            name=body["name"],
            base_model_name=body.get("base_model"),
            description=body["description"],
            promotion_policy=body["promotion_policy"],
        )
        return Response(AdapterSerializer(adapter).data, status=201)


class AdapterView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("PATCH", "DELETE"), Permission.ADAPTERS_WRITE)

    @extend_schema(responses=AdapterSerializer)
    def get(self, request: Request, name: str) -> Response:
        return Response(AdapterSerializer(services.adapter_get(name=name)).data)

    @extend_schema(request=AdapterChangeSerializer, responses=AdapterSerializer)
    def patch(self, request: Request, name: str) -> Response:
        """Change the policy for versions that become ready from now on."""
        body = AdapterChangeSerializer.parsed(request)
        adapter = services.adapter_get(name=name)
        policy, said = body.get("promotion_policy"), body.get("gate")
        gate = None if said is None else gate_policy(said).as_json()
        if policy is not None or gate is not None:
            promotion.promotion_policy_set(adapter=adapter, policy=policy, gate=gate)
        return Response(AdapterSerializer(adapter).data)

    @extend_schema(parameters=[FORCE], responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the adapter with its versions and the runs that trained it.

        409 `in_use` names the alias, schedule or active run that uses it; `force`, which ends them,
        also needs training:write. It deletes aliases whose primary it is, and removes it as canary
        of others. New requests get 404 within a second; running ones finish.
        """
        adapter = services.adapter_get(name=name)
        with_users = is_forced(request)
        if with_users:
            authorize(self.principal, Permission.TRAINING_WRITE)
        deletion.adapter_delete(adapter=adapter, is_forced=with_users)
        return Response(status=204)


class AdapterRollbackView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema(request=PromoteSerializer, responses=SwitchedSerializer)
    def post(self, request: Request, name: str) -> Response:
        """Make the version live that was live before; a second call goes back further.

        The workers load it first, as for `promote`. Every gateway uses it within a second; running
        requests finish on their version.
        """
        body = PromoteSerializer.parsed(request)
        adapter = services.adapter_get(name=name)
        prefetched = before_switch(promotion.version_before(adapter))
        adapter = promotion.adapter_roll_back(adapter=adapter, reason=body["reason"])
        return _switched(adapter, prefetched)


class AdapterHistoryView(TenantAPIView):
    @extend_schema("adapter_history", PAGE_PARAMETERS, responses=page_of(PromotionSerializer))
    def get(self, request: Request, name: str) -> Response:
        """List the changes of the adapter's live version: who, when, why; newest first."""
        adapter = services.adapter_get(name=name)
        rows = Promotion.objects.allowed().filter(adapter=adapter).select_related("adapter")
        return page(request, rows, PromotionSerializer)


class VersionsView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema("versions_list", PAGE_PARAMETERS, responses=page_of(VersionSerializer))
    def get(self, request: Request, name: str) -> Response:
        """List the adapter's versions, newest first."""
        adapter = services.adapter_get(name=name)
        rows = AdapterVersion.objects.allowed().filter(adapter=adapter)
        rows = rows.select_related("adapter", "inspection").defer(*LARGE)
        return page(request, rows, VersionSerializer)

    @extend_schema(request=VersionCreateSerializer, responses={201: VersionCreatedSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Begin a version. PUT each file, with exactly its stated length, to its URL in the answer.

        With `multipart` send each file by parts. Then call `complete`. If there is no adapter of
        this name, it is made.
        """
        body = VersionCreateSerializer.parsed(request)
        version = services.adapter_version_create(
            name=name,
            files=body["files"],
            base_model_name=body.get("base_model"),
            created_by=self.principal.user,
            is_multipart=body["multipart"],
            accepts_base_mismatch=body["accept_base_mismatch"],
        )
        answer = {**VersionSerializer(version).data, "uploads": {}, "upload": None}
        if body["multipart"]:
            answer["upload"] = AdapterUploadSerializer(uploads.upload_state(version)).data
            return Response(answer, status=201)
        urls = services.adapter_version_upload_urls(version=version)
        answer["uploads"] = {
            file: {
                "url": url,
                "method": "PUT",
                "headers": {"Content-Length": str(body["files"][file])},
            }
            for file, url in urls.items()
        }
        return Response(answer, status=201)


class VersionView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("PATCH", "DELETE"), Permission.ADAPTERS_WRITE)

    @extend_schema(responses=VersionSerializer)
    def get(self, request: Request, name: str, number: int) -> Response:
        version = services.adapter_version_get(name=name, number=number)
        return Response(VersionSerializer(version).data)

    @extend_schema(request=VersionChangeSerializer, responses=VersionSerializer)
    def patch(self, request: Request, name: str, number: int) -> Response:
        """Have workers that keep adapters in FP8 answer with the original, or with a good copy."""
        body = VersionChangeSerializer.parsed(request)
        version = services.adapter_version_get(name=name, number=number)
        if "keeps_original" in body:
            version = probing.version_original_set(version=version, **body)
        return Response(VersionSerializer(version).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, name: str, number: int) -> Response:
        """Delete the version; if it was live, the one before it becomes live again.

        Its number is never used again. New requests for it get 404 within a second; running ones
        finish. 409 while its files are being checked.
        """
        deletion.version_delete(version=services.adapter_version_get(name=name, number=number))
        return Response(status=204)


class VersionPromoteView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema(request=PromoteSerializer, responses=SwitchedSerializer)
    def post(self, request: Request, name: str, number: int) -> Response:
        """Make a ready version live: from then on the adapter's name means it.

        All workers of its base model load it first, and this call waits for them, a few seconds at
        most. Then it is live, even if a worker is late. Every gateway uses it within a second;
        running requests finish on their version. If it is live already, nothing changes.
        """
        body = PromoteSerializer.parsed(request)
        version = services.adapter_version_get(name=name, number=number)
        prefetched = before_switch(version)
        adapter = promotion.adapter_version_promote(version=version, reason=body["reason"])
        return _switched(adapter, prefetched)


class VersionCompleteView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema(request=None, responses={202: VersionSerializer})
    def post(self, request: Request, name: str, number: int) -> Response:
        """End the upload of both files. Their check makes the version `ready` or `rejected`."""
        version = services.adapter_version_get(name=name, number=number)
        version = services.adapter_version_complete(version=version)
        return Response(VersionSerializer(version).data, status=202)
