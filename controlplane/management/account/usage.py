"""/api/v1/usage."""

from __future__ import annotations

import datetime as dt
from typing import ClassVar

from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.errors import InvalidRequest
from controlplane.management.base import TenantAPIView
from controlplane.tenants.auth import Permission
from controlplane.usage.models import usage_by_day
from controlplane.usage.training import training_usage_by_day

DEFAULT_DAYS = 30
MAX_DAYS = 366


class UsageDaySerializer(serializers.Serializer[dict[str, object]]):
    date = serializers.DateField()
    model = serializers.CharField()
    requests = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField(help_text="The cached ones of the prompt tokens.")
    completion_tokens = serializers.IntegerField()


class TrainingDaySerializer(serializers.Serializer[dict[str, object]]):
    date = serializers.DateField()
    adapter = serializers.CharField()
    base_model = serializers.CharField()
    runs = serializers.IntegerField(help_text="Training runs that ended or were paused.")
    trained_tokens = serializers.IntegerField()
    cpu_seconds = serializers.FloatField(help_text="Seconds of trainers without a GPU.")
    gpu_seconds = serializers.FloatField()


class UsageSerializer(serializers.Serializer[dict[str, object]]):
    object = serializers.CharField(default="list")
    data = UsageDaySerializer(many=True)  # type: ignore[assignment]
    training = TrainingDaySerializer(many=True)


class UsageView(TenantAPIView):
    permissions: ClassVar = {"GET": Permission.USAGE_READ}

    @extend_schema(
        "usage_list",
        [
            OpenApiParameter("start", dt.date, description="First day; 29 days before `end`."),
            OpenApiParameter("end", dt.date, description="Last day, UTC; default today."),
        ],
        responses=UsageSerializer,
    )
    def get(self, request: Request) -> Response:
        """Return the tenant's requests and tokens by day (UTC) and model, newest first.

        `training`: the use by its training runs, by day and adapter.
        """
        end = _day(request, "end") or timezone.now().date()
        start = _day(request, "start") or end - dt.timedelta(days=DEFAULT_DAYS - 1)
        if not 0 <= (end - start).days < MAX_DAYS:
            raise InvalidRequest(
                f"start must not be after end, and the range can have at most {MAX_DAYS} days.",
                param="start",
            )
        training = training_usage_by_day(start, end)
        return Response({"object": "list", "data": usage_by_day(start, end), "training": training})


def _day(request: Request, name: str) -> dt.date | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        day = dt.date.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} must be a date, as 2026-01-31.", param=name) from error
    if not 2000 <= day.year <= 9000:
        raise InvalidRequest(
            f"{name} is out of range: choose a year from 2000 to 9000.", param=name
        )
    return day
