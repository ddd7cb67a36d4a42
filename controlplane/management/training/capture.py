"""/api/v1/capture and /api/v1/captured-requests: requests that are stored to train on."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from contract.training.row_messages import WrongRow
from controlplane.errors import InvalidRequest
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of
from controlplane.management.base import StrictSerializer, TenantAPIView
from controlplane.management.fields import ChoiceField
from controlplane.management.training.training import DatasetSerializer
from controlplane.requestlog import capture, captured
from controlplane.requestlog.models import CapturedRequest, CapturePolicy
from controlplane.requestlog.sealing import Unreadable
from controlplane.tenancy.model_scope import may_name
from controlplane.tenants.auth import Permission, authorize
from controlplane.training.datasets.captured_rows import dataset_from_captured

_ONLY_HELP = (
    "all: without those that were rated bad and not corrected; good: rated good, or corrected; "
    "corrected; pairs: corrected ones, for the method dpo."
)
_SHARES_HELP = "By the model's name (an alias, an adapter, a version), in place of `share`."
_FILTERS = [
    OpenApiParameter("only", str, enum=["any", *captured.ONLY], description=_ONLY_HELP),
    OpenApiParameter("model", str, description="Only requests for this model."),
    OpenApiParameter("captured_after", str, description="Only those captured then or later."),
    OpenApiParameter("captured_before", str, description="Only those captured before."),
]


class CapturePolicySerializer(serializers.ModelSerializer[CapturePolicy]):
    object = serializers.CharField(default="capture", read_only=True)
    shares = serializers.SerializerMethodField(help_text=_SHARES_HELP)

    class Meta:
        model = CapturePolicy
        fields = ("object", "share", "shares", "days", "max_rows", "max_bytes")

    def get_shares(self, policy: CapturePolicy) -> dict[str, float]:
        return {model: share for model, share in policy.shares.items() if may_name(model)}


class CapturePolicySetSerializer(StrictSerializer):
    share = serializers.FloatField(
        required=False, min_value=0, max_value=1, help_text="Share of all requests; 0: none."
    )
    shares = serializers.DictField(
        child=serializers.FloatField(min_value=0, max_value=1),
        required=False,
        help_text=_SHARES_HELP,
    )
    days = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=capture.MAX_DAYS,
        help_text="Days after which they are deleted.",
    )
    max_rows = serializers.IntegerField(
        required=False,
        min_value=1,
        max_value=capture.MAX_ROWS,
        help_text="If it is exceeded, the oldest are deleted, those with feedback last.",
    )
    max_bytes = serializers.IntegerField(
        required=False, min_value=capture.MIN_BYTES, max_value=capture.MAX_BYTES
    )


class CapturePolicyView(TenantAPIView):
    permissions: ClassVar = {"PUT": Permission.TENANT_MANAGE}

    @extend_schema("capture", responses=CapturePolicySerializer)
    def get(self, request: Request) -> Response:
        """Return the shares of requests that are stored to train on, and the time limits."""
        return Response(CapturePolicySerializer(capture.capture_policy()).data)

    @extend_schema(
        "capture_set", request=CapturePolicySetSerializer, responses=CapturePolicySerializer
    )
    def put(self, request: Request) -> Response:
        """Choose the requests to store from now on. Fields that are left out stay as they are."""
        body = CapturePolicySetSerializer.parsed(request)
        policy = capture.capture_policy()
        names = ("share", "shares", "days", "max_rows", "max_bytes")
        fields: dict[str, Any] = {name: body.get(name, getattr(policy, name)) for name in names}
        return Response(CapturePolicySerializer(capture.capture_policy_set(**fields)).data)


class CapturedRequestSerializer(serializers.ModelSerializer[CapturedRequest]):
    object = serializers.CharField(default="captured_request", read_only=True)
    id = serializers.CharField(source="request_id")
    cursor = serializers.UUIDField(source="pk")
    captured_at = serializers.DateTimeField(source="created_at")
    rating = serializers.CharField(help_text="good, bad, or empty.")
    has_corrected_answer = serializers.SerializerMethodField()

    class Meta:
        model = CapturedRequest
        fields = (
            "id", "object", "cursor", "model", "captured_at", "rating",
            "has_corrected_answer", "num_bytes",
        )  # fmt: skip

    def get_has_corrected_answer(self, row: CapturedRequest) -> bool:
        return bool(row.sealed_answer)


class CapturedRowSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="captured_request.row")
    id = serializers.CharField()
    row = serializers.DictField(help_text="The row as in a dataset.")


class _ErasedSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="captured_requests.deleted")
    deleted = serializers.IntegerField()


class _FilterSerializer(StrictSerializer):
    only = ChoiceField(
        [(name, name) for name in captured.ONLY], default="all", help_text=_ONLY_HELP
    )
    model = serializers.CharField(
        required=False, allow_null=True, default=None, max_length=capture.MAX_MODEL_CHARS
    )
    captured_after = serializers.DateTimeField(required=False, allow_null=True, default=None)
    captured_before = serializers.DateTimeField(required=False, allow_null=True, default=None)


class _FromFilterSerializer(_FilterSerializer):
    append = serializers.BooleanField(
        default=False,
        help_text="Append requests that it does not have, instead of replacing its rows.",
    )


class _QueryFilterSerializer(_FilterSerializer):
    only = ChoiceField([(name, name) for name in ("any", *captured.ONLY)], default="any")


def _filter(said: dict[str, Any]) -> captured.Filter:
    return captured.Filter(
        only=said["only"],
        model=said["model"],
        after=said["captured_after"],
        before=said["captured_before"],
    )


def _query_filter(request: Request) -> captured.Filter:
    names = [parameter.name for parameter in _FILTERS]
    given = {name: request.query_params[name] for name in names if name in request.query_params}
    if any("\0" in text for text in given.values()):
        raise InvalidRequest("This must not have NUL characters: remove them.", param="model")
    form = _QueryFilterSerializer(data=given)
    form.is_valid(raise_exception=True)
    return _filter(form.validated_data)


class CapturedRequestsView(TenantAPIView):
    permissions: ClassVar = {
        "GET": Permission.REQUESTS_READ,
        "DELETE": Permission.REQUESTS_CONTENT,
    }

    @extend_schema(
        "captured_requests",
        [*PAGE_PARAMETERS, *_FILTERS],
        responses=page_of(CapturedRequestSerializer),
    )
    def get(self, request: Request) -> Response:
        """List the requests that are kept to train on, newest first, without their texts."""
        rows = _query_filter(request).rows()
        return page(request, rows, CapturedRequestSerializer, cursor="cursor")

    @extend_schema("captured_requests_delete", _FILTERS, responses={200: _ErasedSerializer})
    def delete(self, request: Request) -> Response:
        """Erase those that the filters name; without a filter all. Datasets made of them stay."""
        num = captured.captures_delete(wanted=_query_filter(request))
        return Response({"object": "captured_requests.deleted", "deleted": num})


class CapturedRequestView(TenantAPIView):
    permissions: ClassVar = dict.fromkeys(("GET", "DELETE"), Permission.REQUESTS_CONTENT)

    @extend_schema("captured_request", responses=CapturedRowSerializer)
    def get(self, request: Request, request_id: str) -> Response:
        """Return the row that a captured request gives."""
        found = captured.captured_get(request_id=request_id)
        try:
            row = captured.row_of(found, capture.capture_policy())
        except (Unreadable, WrongRow) as error:
            raise captured.no_row() from error
        return Response({"object": "captured_request.row", "id": request_id, "row": row})

    @extend_schema("captured_request_delete", responses={204: None})
    def delete(self, request: Request, request_id: str) -> Response:
        """Erase one captured request with its corrected answer."""
        captured.captured_delete(request_id=request_id)
        return Response(status=204)


class _FromCapturedSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="dataset_from_captured")
    dataset = DatasetSerializer()
    num_added = serializers.IntegerField(help_text="Rows that its current version has added.")
    num_left_out = serializers.IntegerField(
        help_text="Captured requests that give no row, or that exceeded the dataset's size."
    )


class DatasetFromCapturedView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.TRAINING_WRITE}

    @extend_schema(
        "dataset_from_captured",
        request=_FromFilterSerializer,
        responses={201: _FromCapturedSerializer},
    )
    def post(self, request: Request, name: str) -> Response:
        """Make the dataset of this name from captured requests; needs requests:content, too.

        Corrected answers stand in place of the model's. It replaces a dataset of this name, unless
        `append` is true: then a request is added once.
        """
        authorize(self.principal, Permission.REQUESTS_CONTENT)
        body = _FromFilterSerializer.parsed(request)
        made = dataset_from_captured(name=name, wanted=_filter(body), appends=body["append"])
        answer = {
            "object": "dataset_from_captured",
            "dataset": DatasetSerializer(made.dataset).data,
            "num_added": made.num_added,
            "num_left_out": made.num_left_out,
        }
        return Response(answer, status=201)
