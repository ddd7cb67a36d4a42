"""/api/v1/aliases/{name}/canary and /api/v1/aliases/{name}/timetable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.aliases import ramps, services
from controlplane.aliases.comparison import Comparison, compare
from controlplane.aliases.guards import guard_parse
from controlplane.aliases.models import Ramp
from controlplane.aliases.verdict import BOUNDS, LATENCIES, RATES, Counts, Guard
from controlplane.errors import Conflict
from controlplane.gateway.rest.fields import DescribedField
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.management.fields import ChoiceField
from controlplane.queue.placement.residency import before_canary
from controlplane.tenants.auth import Permission

_GUARD_HELP = {
    "is_on": "Whether the canary is rolled back automatically.",
    "min_requests": "Requests of the canary before it is judged.",
    "confidence": "Confidence of the whole judgement, however often it is made.",
    "errors_points": "Roll back when this many percentage points more requests fail by the model's "
    "or our fault. Null: not watched.",
    "schema_points": "The same for answers that break their schema.",
    "truncations_points": "The same for answers that were cut at their maximal length.",
    "first_token_factor": "Roll back when the median time from a request's turn to its first token "
    "is this many times the primary's, and 50 ms more. Null: not watched.",
    "token_factor": "The same for the time per further token, and 5 ms more.",
}


class GuardSerializer(serializers.Serializer[Any]):
    """The limits at which a canary is rolled back automatically."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields: dict[str, serializers.Field[Any, Any, Any, Any]] = {
            "is_on": serializers.BooleanField(help_text=_GUARD_HELP["is_on"])
        }
        for name, (least, most) in BOUNDS.items():
            kind = serializers.IntegerField if name == "min_requests" else serializers.FloatField
            fields[name] = kind(
                min_value=least,  # type: ignore[arg-type]
                max_value=most,  # type: ignore[arg-type]
                allow_null=name not in ("min_requests", "confidence"),
                help_text=_GUARD_HELP[name],
            )
        return fields


def _guard_schema() -> dict[str, Any]:
    properties: dict[str, Any] = {"is_on": {"type": "boolean"}}
    for name, (least, most) in BOUNDS.items():
        kind = "integer" if name == "min_requests" else "number"
        may_be_none = name not in ("min_requests", "confidence")
        properties[name] = {
            "type": [kind, "null"] if may_be_none else kind,
            "minimum": least,
            "maximum": most,
        }
    for name, schema in properties.items():
        schema |= {"default": getattr(Guard(), name), "description": _GUARD_HELP[name]}
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "description": "The limits at which a canary is rolled back automatically. They replace "
        "the earlier guard: fields left out have their default.",
    }


class GuardSetField(DescribedField):
    """A guard in a request; the service checks its values."""

    def __init__(self, **options: Any) -> None:
        super().__init__(_guard_schema(), **options)

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        if not isinstance(data, Mapping):
            raise serializers.ValidationError("This must be an object.")
        return guard_parse(data)


class RateSerializer(serializers.Serializer[Any]):
    events = serializers.IntegerField()
    trials = serializers.IntegerField()
    value = serializers.FloatField(allow_null=True, help_text="events / trials; null without any.")
    low = serializers.FloatField(
        help_text="The true rate is between low and high, with the guard's confidence, however "
        "often one looks."
    )
    high = serializers.FloatField()


class MedianSerializer(serializers.Serializer[Any]):
    low = serializers.FloatField(allow_null=True, help_text="The median is at least this, in ms.")
    high = serializers.FloatField(allow_null=True, help_text="The median is at most this, in ms.")


class TargetSerializer(serializers.Serializer[Any]):
    requests = serializers.IntegerField(
        help_text="Ended requests, without those that the client cancelled or got wrong."
    )

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        rates = {measure.name: RateSerializer() for measure in RATES}
        medians = {measure.name: MedianSerializer() for measure in LATENCIES}
        return {**super().get_fields(), **rates, **medians}


class CanarySerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="canary", read_only=True)
    alias = serializers.CharField()
    revision = serializers.IntegerField(help_text="All counts are since this revision.")
    canary_percent = serializers.IntegerField()
    canary = TargetSerializer()
    primary = TargetSerializer()
    primary_since = serializers.IntegerField(
        allow_null=True,
        help_text="The revision of the primary's counts, if it gets no requests now.",
    )
    guard = GuardSerializer()
    problems = serializers.ListField(
        child=serializers.CharField(), help_text="The reasons why it is about to be rolled back."
    )


class StepSerializer(StrictSerializer):
    percent = serializers.IntegerField(min_value=1, max_value=100)
    minutes = serializers.IntegerField(
        required=False,
        default=ramps.DEFAULTS["minutes"],
        min_value=ramps.BOUNDS["minutes"][0],
        max_value=ramps.BOUNDS["minutes"][1],
        help_text="The least duration of the step.",
    )
    min_requests = serializers.IntegerField(
        required=False,
        default=ramps.DEFAULTS["min_requests"],
        min_value=ramps.BOUNDS["min_requests"][0],
        max_value=ramps.BOUNDS["min_requests"][1],
        help_text="Requests that the canary must have had before the next step.",
    )


class RampSetSerializer(StrictSerializer):
    steps = StepSerializer(
        many=True, required=False, help_text="Left out: 1, 10, 50 and 100 percent."
    )
    at_end = ChoiceField(
        Ramp.AtEnd.choices,
        required=False,
        default=Ramp.AtEnd.PROMOTE.value,
        help_text="What follows the last step.",
    )
    reason = serializers.CharField(
        required=False, default="", allow_blank=True, max_length=services.MAX_REASON_CHARS
    )
    if_revision = serializers.IntegerField(
        required=False,
        allow_null=True,
        default=None,
        min_value=1,
        max_value=2**31 - 1,
        help_text="The number that the current revision must have.",
    )


class RampSerializer(serializers.ModelSerializer[Ramp]):
    object = serializers.CharField(default="ramp", read_only=True)
    alias = serializers.CharField(source="alias.name")
    steps = StepSerializer(many=True)
    step = serializers.SerializerMethodField(help_text="The number of the current step, from 1.")
    revision = serializers.IntegerField(
        source="revision_number", help_text="The revision that the current step made."
    )
    canary_requests = serializers.SerializerMethodField(
        help_text="Requests of the canary in the current step; null when the ramp has ended."
    )
    is_held = serializers.SerializerMethodField(
        help_text="Whether the step's minutes are over and its requests too few."
    )

    class Meta:
        model = Ramp
        fields = (
            "object", "alias", "steps", "at_end", "state", "step", "due_at", "revision",
            "canary_requests", "is_held", "reason", "actor_type", "actor_name", "updated_at",
        )  # fmt: skip

    def get_step(self, ramp: Ramp) -> int:
        return ramp.step + 1

    def get_canary_requests(self, ramp: Ramp) -> int | None:
        found = ramps.progress(ramp)
        return None if found is None else found.requests

    def get_is_held(self, ramp: Ramp) -> bool:
        found = ramps.progress(ramp)
        return found is not None and found.is_held


class CanaryView(TenantAPIView):
    @extend_schema(responses=CanarySerializer)
    def get(self, request: Request, name: str) -> Response:
        """Compare the answers of canary and primary since this revision.

        409 `no_canary` when the alias has none, or its percent is 0.
        """
        alias = services.alias_get(name=name)
        revision = services.revision_get(alias=alias)
        if not revision.canary_percent:
            raise Conflict(
                f"No canary of {name} gets requests: set one with a percent above 0.",
                code="no_canary",
            )
        found = compare(revision)
        answer = {
            "alias": name,
            "revision": revision.number,
            "canary_percent": revision.canary_percent,
            "canary": _target(found.canary, found),
            "primary": _target(found.primary, found),
            "primary_since": found.primary_since,
            "guard": found.guard,
            "problems": found.problems,
        }
        return Response(CanarySerializer(answer).data)


def _target(counts: Counts, found: Comparison) -> dict[str, Any]:
    risk = found.guard.risk
    medians = {}
    for measure in LATENCIES:
        low, high = measure.of(counts, risk)
        medians[measure.name] = {"low": low, "high": high}
    rates = {measure.name: measure.of(counts, risk) for measure in RATES}
    return {"requests": counts.requests, **rates, **medians}


class RampView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("PUT", "DELETE"), Permission.ADAPTERS_WRITE)

    @extend_schema(responses=RampSerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return the alias's newest ramp."""
        return Response(RampSerializer(ramps.ramp_of(services.alias_get(name=name))).data)

    @extend_schema(request=RampSetSerializer, responses=RampSerializer)
    def put(self, request: Request, name: str) -> Response:
        """Give the canary more and more requests by a plan, which replaces an earlier ramp.

        Its first step is made at once. It stops when the canary is rolled back, or anybody changes
        the alias.
        """
        body = RampSetSerializer.parsed(request)
        alias = services.alias_get(name=name)
        before_canary(alias)
        ramp = ramps.ramp_start(
            alias=alias,
            steps=body.get("steps", ramps.DEFAULT_STEPS),
            at_end=body["at_end"],
            reason=body["reason"],
            if_revision=body["if_revision"],
        )
        return Response(RampSerializer(ramp).data)

    @extend_schema(responses={200: RampSerializer})
    def delete(self, request: Request, name: str) -> Response:
        """Stop the ramp; the canary keeps its share."""
        ramp = ramps.ramp_cancel(alias=services.alias_get(name=name))
        return Response(RampSerializer(ramp).data)


class RampPauseView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema(request=None, responses=RampSerializer)
    def post(self, request: Request, name: str) -> Response:
        """Let the current step last until the ramp is resumed."""
        ramp = ramps.ramp_pause(alias=services.alias_get(name=name))
        return Response(RampSerializer(ramp).data)


class RampResumeView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema(request=None, responses=RampSerializer)
    def post(self, request: Request, name: str) -> Response:
        """Resume a paused ramp; the minutes of the current step begin again."""
        ramp = ramps.ramp_resume(alias=services.alias_get(name=name))
        return Response(RampSerializer(ramp).data)
