"""/api/v1/datasets, /api/v1/training-runs and /api/v1/adapters/{name}/schedule."""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response

from contract.training.job import Hyperparameters
from controlplane.adapters.services import adapter_get
from controlplane.deletion import services as deletion
from controlplane.errors import InvalidRequest, PayloadTooLarge
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import FORCE, StrictSerializer, TenantAPIView, flag, is_forced
from controlplane.management.fields import ChoiceField
from controlplane.tenants.auth import Permission
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset, Schedule, TrainingRun
from controlplane.training.runs import picking
from controlplane.training.runs import services as run_services
from controlplane.training.schedules import services as schedule_services
from controlplane.training.schedules.schedule_rules import settings_changed

_NAME = OpenApiParameter("name", str, required=True, description="The dataset's name.")
_APPEND = OpenApiParameter(
    "append", bool, description="Append the rows, instead of replacing the present ones."
)
_ADAPTER = OpenApiParameter("adapter", str, description="Only the runs of this adapter.")
_HYPERPARAMETERS_HELP = (
    f"{', '.join(field.name for field in dataclasses.fields(Hyperparameters))}; those left "
    "out have the trainer's defaults."
)
_VALIDATION_HELP = "Rows to validate with, instead of a `validation_share` of the dataset's."


_RELATED = ("adapter", "dataset", "validation_dataset", "version__gate")


class RowsParser(BaseParser):
    """A parser of any media type as bytes, up to the limit of a dataset."""

    media_type = "*/*"

    def parse(  # type: ignore[override]  # a view gets what its parser gives
        self,
        stream: Any,
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> bytes:
        content: bytes = stream.read(dataset_services.MAX_DIRECT_BYTES + 1)
        if len(content) > dataset_services.MAX_DIRECT_BYTES:
            raise PayloadTooLarge(
                f"A request's body can have at most {dataset_services.MAX_DIRECT_BYTES} bytes of "
                "rows. Upload more as a file with purpose fine-tune, and make it a version."
            )
        return content


class DatasetSerializer(serializers.ModelSerializer[Dataset]):
    object = serializers.CharField(default="dataset", read_only=True)

    class Meta:
        model = Dataset
        fields = (
            "id", "object", "name", "version", "sha256", "num_bytes", "num_rows",
            "created_at", "updated_at",
        )  # fmt: skip


class TrainingRunSerializer(serializers.ModelSerializer[TrainingRun]):
    object = serializers.CharField(default="training_run", read_only=True)
    adapter = serializers.CharField(source="adapter.name")
    dataset = serializers.CharField(
        source="dataset.name",
        default=None,
        allow_null=True,
        help_text="null: the dataset was deleted.",
    )
    validation_dataset = serializers.CharField(
        source="validation_dataset.name", default=None, allow_null=True
    )
    version = serializers.IntegerField(
        source="version.number",
        default=None,
        allow_null=True,
        help_text="The adapter version that it made.",
    )
    habits = serializers.DictField(
        source="version.gate.habits",
        default=dict,
        help_text="The gate's figures of how the version answers; empty: it compared none.",
    )
    error = serializers.CharField(help_text="The reason of a failure; empty: it did not fail.")
    waits_until = serializers.SerializerMethodField(
        help_text="When the platform's training window opens for a queued run; null if it is open."
    )

    def get_waits_until(self, run: TrainingRun) -> dt.datetime | None:
        return picking.window_opens_at() if run.status == TrainingRun.Status.QUEUED else None

    class Meta:
        model = TrainingRun
        fields = (
            "id", "object", "adapter", "dataset", "dataset_version", "dataset_sha256",
            "validation_dataset", "validation_sha256", "status", "progress",
            "error", "waits_until", "cancel_requested", "attempts", "version", "habits",
            "hyperparameters", "created_at", "started_at", "finished_at",
        )  # fmt: skip


class TrainingRunCreateSerializer(StrictSerializer):
    adapter = serializers.CharField(
        max_length=63, help_text="The adapter, which is made if it does not exist."
    )
    dataset = serializers.CharField(
        max_length=80, help_text="Its name, for the current version, or name@n."
    )
    validation_dataset = serializers.CharField(
        required=False, max_length=63, help_text=_VALIDATION_HELP
    )
    hyperparameters = serializers.JSONField(required=False, help_text=_HYPERPARAMETERS_HELP)
    base_model = serializers.CharField(
        required=False, help_text="For a new adapter when there are several base models."
    )


class ScheduleSerializer(serializers.ModelSerializer[Schedule]):
    object = serializers.CharField(default="schedule", read_only=True)
    adapter = serializers.CharField(source="adapter.name")
    dataset = serializers.CharField(source="dataset.name")
    validation_dataset = serializers.CharField(
        source="validation_dataset.name", default=None, allow_null=True
    )

    grace_s = serializers.SerializerMethodField(help_text="Seconds by which a slot may be late.")
    owed_slot = serializers.DateTimeField(
        allow_null=True, help_text="A missed slot that will run as soon as possible."
    )

    def get_grace_s(self, schedule: Schedule) -> int:
        return round(schedule.grace.total_seconds())

    class Meta:
        model = Schedule
        fields = (
            "id", "object", "adapter", "dataset", "validation_dataset", "cron", "timezone",
            "hyperparameters", "is_paused", "next_run_at", "created_at",
            "skip_unchanged", "window", "misfire", "grace_s", "max_runs_per_day", "owed_slot",
        )  # fmt: skip


class ScheduleRulesSerializer(StrictSerializer):
    """The rules of a schedule beside its times."""

    skip_unchanged = serializers.BooleanField(
        required=False,
        help_text="Skip a slot if rows and settings are those of the adapter's last run that "
        "succeeded.",
    )
    window = serializers.CharField(
        required=False,
        allow_blank=True,
        max_length=11,
        help_text="Hours in which runs may begin, in the schedule's time zone: `22:00-06:00`.",
    )
    misfire = ChoiceField(
        Schedule.Misfire.choices,
        required=False,
        help_text="The rule for slots that could not run within `grace_s`.",
    )
    grace_s = serializers.IntegerField(
        required=False, help_text="Seconds by which a slot may be late."
    )
    max_runs_per_day = serializers.IntegerField(
        required=False, allow_null=True, help_text="Most runs in 24 hours; null: any number."
    )


class ScheduleSetSerializer(ScheduleRulesSerializer):
    dataset = serializers.CharField(max_length=63)
    validation_dataset = serializers.CharField(
        required=False, allow_null=True, max_length=63, help_text=_VALIDATION_HELP
    )
    cron = serializers.CharField(
        max_length=100, help_text="Minute, hour, day, month, weekday: `30 2 * * *` is nightly."
    )
    timezone = serializers.CharField(
        required=False, max_length=64, help_text="An IANA name: Europe/Berlin; at first UTC."
    )
    hyperparameters = serializers.JSONField(required=False, help_text=_HYPERPARAMETERS_HELP)
    is_paused = serializers.BooleanField(required=False)


class DatasetsView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.TRAINING_WRITE}

    def get_parsers(self) -> list[BaseParser]:
        return [RowsParser()]

    @extend_schema("datasets_list", PAGE_PARAMETERS, responses=page_of(DatasetSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's datasets, newest first."""
        return page(request, Dataset.objects.all(), DatasetSerializer)

    @extend_schema(
        parameters=[_NAME, _APPEND],
        request={"application/jsonl": OpenApiTypes.BINARY},
        responses={201: DatasetSerializer},
    )
    def post(self, request: Request) -> Response:
        """Upload chat JSONL: the body is the file, of 32 MiB at most. It becomes the next version.

        It replaces the rows of a dataset of this name, or is appended to them. Each line is a chat
        as OpenAI defines it for fine-tuning, {"messages": […], "tools": […]}, or {"prompt",
        "completion"}. The assistant's messages are learned, except those of weight 0.
        """
        name = request.query_params.get("name")
        if name is None:
            raise InvalidRequest("Name the dataset: POST …/datasets?name=…", param="name")
        # Without a body the parser does not run.
        content = request.data if isinstance(request.data, bytes) else b""
        appends = flag(request, "append")
        dataset = dataset_services.dataset_upload(name=name, content=content, appends=appends)
        return Response(DatasetSerializer(dataset).data, status=201)


class DatasetView(TenantAPIView):
    permissions: ClassVar = {"DELETE": Permission.TRAINING_WRITE}

    @extend_schema(responses=DatasetSerializer)
    def get(self, request: Request, name: str) -> Response:
        return Response(DatasetSerializer(dataset_services.dataset_get(name=name)).data)

    @extend_schema(parameters=[FORCE], responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the dataset; runs that have ended stay, without it.

        409 `in_use` names the schedules and active runs that use it.
        """
        dataset = dataset_services.dataset_get(name=name)
        deletion.dataset_delete(dataset=dataset, is_forced=is_forced(request))
        return Response(status=204)


class TrainingRunsView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.TRAINING_WRITE}

    @extend_schema(
        "training_runs_list",
        parameters=[*PAGE_PARAMETERS, _ADAPTER],
        responses=page_of(TrainingRunSerializer),
    )
    def get(self, request: Request) -> Response:
        """List the tenant's training runs, newest first."""
        rows = TrainingRun.objects.allowed().select_related(*_RELATED)
        adapter = request.query_params.get("adapter")
        if adapter is not None:
            rows = rows.filter(adapter=adapter_get(name=adapter))
        return page(request, rows, TrainingRunSerializer)

    @extend_schema(request=TrainingRunCreateSerializer, responses={201: TrainingRunSerializer})
    def post(self, request: Request) -> Response:
        """Train an adapter on a dataset. The result becomes its next version."""
        body = TrainingRunCreateSerializer.parsed(request)
        run = run_services.training_run_create(
            adapter_name=body["adapter"],
            dataset_name=body["dataset"],
            hyperparameters=body.get("hyperparameters"),
            validation_dataset_name=body.get("validation_dataset"),
            base_model_name=body.get("base_model"),
            created_by=self.principal.user,
        )
        return Response(TrainingRunSerializer(run).data, status=201)


class TrainingRunView(TenantAPIView):
    @extend_schema(responses=TrainingRunSerializer)
    def get(self, request: Request, run_id: uuid.UUID) -> Response:
        return Response(TrainingRunSerializer(run_services.training_run_get(run_id=run_id)).data)


class TrainingRunCancelView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.TRAINING_WRITE}

    @extend_schema(request=None, responses=TrainingRunSerializer)
    def post(self, request: Request, run_id: uuid.UUID) -> Response:
        """Cancel a run that is queued or running; it is `cancelled` within seconds."""
        run = run_services.training_run_cancel(run=run_services.training_run_get(run_id=run_id))
        return Response(TrainingRunSerializer(run).data)


class ScheduleView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("PUT", "DELETE"), Permission.TRAINING_WRITE)

    @extend_schema(responses=ScheduleSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return the adapter's schedule."""
        schedule = schedule_services.schedule_get(adapter=adapter_get(name=name))
        return Response(ScheduleSerializer(schedule).data)

    @extend_schema(request=ScheduleSetSerializer, responses=ScheduleSerializer)
    def put(self, request: Request, name: str) -> Response:
        """Retrain the adapter by a cron line in a time zone.

        Fields left out stay as they are; a new schedule has the defaults.
        """
        adapter = adapter_get(name=name)
        body = ScheduleSetSerializer.parsed(request)
        known = Schedule.objects.allowed().filter(adapter=adapter).first()
        schedule = schedule_services.schedule_set(adapter=adapter, **settings_changed(known, body))
        return Response(ScheduleSerializer(schedule).data)

    @extend_schema(responses={204: None})
    def delete(self, request: Request, name: str) -> Response:
        """Delete the schedule; runs that have started continue."""
        schedule_services.schedule_delete(adapter=adapter_get(name=name))
        return Response(status=204)
