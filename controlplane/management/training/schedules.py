"""/api/v1/adapters/{name}/schedule/run and …/schedule/runs."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters.services import adapter_get
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import TenantAPIView
from controlplane.tenants.auth import Permission
from controlplane.training.models import ScheduleRun
from controlplane.training.schedules import schedules
from controlplane.training.schedules.services import schedule_get


class ScheduleRunSerializer(serializers.ModelSerializer[ScheduleRun]):
    object = serializers.CharField(default="schedule_run", read_only=True)
    state = serializers.CharField(
        help_text="`skipped`, `missed`, or the status of the training run that it started."
    )
    reason = serializers.CharField(
        help_text="Why it was skipped or missed: unchanged, runs_per_day, merged, busy, quota, "
        "window, base_model or late; empty otherwise."
    )
    why = serializers.CharField(help_text="The reason in words.")
    trigger = serializers.CharField(help_text="`clock`, or `manual`: somebody ran it.")
    training_run = serializers.UUIDField(source="training_run_id", allow_null=True)
    num_rows = serializers.IntegerField(
        source="training_run.num_rows", default=None, allow_null=True
    )
    rows_before = serializers.IntegerField(
        allow_null=True, help_text="Rows of the adapter's last run before that succeeded."
    )

    class Meta:
        model = ScheduleRun
        fields = (
            "id", "object", "slot", "state", "reason", "why", "trigger", "training_run",
            "num_rows", "rows_before", "created_at", "concluded_at",
        )  # fmt: skip


class ScheduleRunsView(TenantAPIView):
    @extend_schema("schedule_runs", PAGE_PARAMETERS, responses=page_of(ScheduleRunSerializer))
    def get(self, request: Request, name: str) -> Response:
        """List the outcomes of the schedule's slots, the newest first.

        The newest 200 are kept, for 90 days.
        """
        schedule = schedule_get(adapter=adapter_get(name=name))
        rows = ScheduleRun.objects.allowed().filter(schedule=schedule)
        rows = rows.select_related("training_run")
        return page(request, rows, ScheduleRunSerializer)


class ScheduleRunNowView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.TRAINING_WRITE}

    @extend_schema("schedule_run_now", request=None, responses={201: ScheduleRunSerializer})
    def post(self, request: Request, name: str) -> Response:
        """Start the schedule's training run now, regardless of its rules.

        409 `run_active` while the adapter has an active run. The next slot stays as it is.
        """
        schedule = schedule_get(adapter=adapter_get(name=name))
        row = schedules.schedule_run_now(schedule, created_by=self.principal.user)
        return Response(ScheduleRunSerializer(row).data, status=201)
