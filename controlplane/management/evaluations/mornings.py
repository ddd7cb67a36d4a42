"""/api/v1/morning: the changes that schedules made last night."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters.services import adapter_get
from controlplane.errors import InvalidRequest
from controlplane.evaluations.morning.report import Entry, morning_of
from controlplane.evaluations.morning.telling import moment_of
from controlplane.gateway.rest.fields import DescribedField
from controlplane.management.base import TenantAPIView
from controlplane.management.evaluations.evaluations import ComparisonSerializer
from controlplane.management.evaluations.gates import GateSerializer
from controlplane.management.training.schedules import ScheduleRunSerializer

_PARAMETERS = [
    OpenApiParameter(
        "until", str, description="The end of the 24 hours, RFC 3339; now by default."
    ),
    OpenApiParameter("adapter", str, description="Only the schedule of this adapter."),
]
_CURVE = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}


class MorningEntrySerializer(serializers.Serializer[Entry]):
    """The night of one adapter's schedule."""

    adapter = serializers.CharField()
    slot = ScheduleRunSerializer(
        source="row", help_text="The newest slot that ran, else the newest one."
    )
    counts = serializers.DictField(
        child=serializers.IntegerField(), help_text="Slots of the night by state."
    )
    version = serializers.IntegerField(
        source="run.version.number",
        default=None,
        allow_null=True,
        help_text="The version that the run made.",
    )
    error = serializers.CharField(source="run.error", default="")
    num_rows = serializers.IntegerField(allow_null=True)
    rows_added = serializers.IntegerField(
        allow_null=True,
        help_text="Rows added since the last successful run; negative: there are fewer.",
    )
    losses = DescribedField(_CURVE, help_text="[step, loss] of the training.")
    validation_losses = DescribedField(_CURVE, help_text="[step, loss] of the validation.")
    best_loss = serializers.FloatField(allow_null=True, help_text="In validation.")
    best_loss_before = serializers.FloatField(allow_null=True)
    gate = GateSerializer(
        allow_null=True, help_text="The gate's decision; null: there was no gate."
    )
    comparison = ComparisonSerializer(
        source="compared",
        allow_null=True,
        help_text="Comparison with the version that was live, for the first five entries. Set "
        "`adapter` to get another one.",
    )


class MorningSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="morning", read_only=True)
    since = serializers.DateTimeField()
    until = serializers.DateTimeField()
    counts = serializers.DictField(
        child=serializers.IntegerField(), help_text="Slots of all schedules by state."
    )
    data = MorningEntrySerializer(  # type: ignore[assignment]  # a field's name
        source="entries", many=True
    )
    num_pairs = serializers.IntegerField(
        help_text="Corrected answers that came in, each a pair with the given one."
    )
    num_more = serializers.IntegerField(help_text="Number of schedules left out: 50 are shown.")


class MorningView(TenantAPIView):
    @extend_schema("morning", parameters=_PARAMETERS, responses=MorningSerializer)
    def get(self, request: Request) -> Response:
        """Return the changes that schedules made in the 24 hours up to `until`.

        For each schedule: rows added, the curves, the gate's decision with its reasons, differences
        with intervals, and the 20 answers that changed most.
        """
        name = request.query_params.get("adapter")
        if name is not None:
            adapter_get(name=name)
        given = request.query_params.get("until", "")
        until = moment_of(given)
        if given and until is None:
            raise InvalidRequest("This must be a time such as 2026-05-01T06:00:00Z.", param="until")
        return Response(MorningSerializer(morning_of(until, by=self.principal, adapter=name)).data)
