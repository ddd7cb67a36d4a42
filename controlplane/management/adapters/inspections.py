"""/api/v1/adapters/{name}/versions/{number}/doctor, and the probe in a version's object."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters import probing, services
from controlplane.adapters.models import AdapterInspection, AdapterVersion
from controlplane.evaluations.inspections.reports import device_bytes, is_estimated
from controlplane.management.base import TenantAPIView
from controlplane.tenants.auth import Permission

PROBE_HELP = (
    "Whether a worker computes with it what PEFT computes: `status` is waiting, agreed, mismatch "
    "or not_run, `why` says more; null for a version that was never inspected."
)
#: Large fields of a version's inspection, which lists leave out.
LARGE = ("inspection__doctor", "inspection__compared", "inspection__facts")


def probe_of(version: AdapterVersion) -> dict[str, Any] | None:
    """Return the probe for a version's object."""
    inspection = getattr(version, "inspection", None)
    if inspection is None:
        return None
    return {
        "status": inspection.status,
        "why": inspection.why,
        "inspected_at": inspection.inspected_at,
        **inspection.probe,
    }


class DoctorFindingSerializer(serializers.Serializer[dict[str, str]]):
    code = serializers.CharField()
    level = serializers.CharField(help_text="`warning` or `note`.")
    message = serializers.CharField()


class DoctorSerializer(serializers.Serializer[AdapterInspection]):
    object = serializers.CharField(default="adapter_doctor", read_only=True)
    adapter = serializers.CharField(source="version.adapter.name")
    number = serializers.IntegerField(source="version.number")
    probe = serializers.SerializerMethodField(help_text=PROBE_HELP)
    device_bytes = serializers.SerializerMethodField(
        help_text="Its memory on the device of the probed worker, in whole eighths of pages; null "
        "until the device is known."
    )
    is_estimated = serializers.SerializerMethodField(
        help_text="Whether `device_bytes` is computed from the number of parameters, because no "
        "worker has told it."
    )
    load_ms = serializers.FloatField(
        source="probe.load_ms",
        default=None,
        allow_null=True,
        help_text="Time in which the probed worker loaded it; 0 if an old worker had it already.",
    )
    summary = serializers.DictField(source="doctor.summary", default=dict)
    findings = DoctorFindingSerializer(source="doctor.findings", many=True, default=list)
    modules = serializers.ListField(
        source="doctor.modules",
        child=serializers.DictField(),
        default=list,
        help_text="For each adapted matrix: norms of the scaled change B·A, its norm relative to "
        "the base's, singular values, effective rank, ranks that keep 90% and 99% of its energy.",
    )
    compared = serializers.ListField(
        child=serializers.DictField(),
        help_text="For each prompt: token ids, and the log-probabilities of all but the first by "
        "PEFT, by the worker, and by PEFT without the adapter.",
    )

    def get_probe(self, inspection: AdapterInspection) -> dict[str, Any] | None:
        return probe_of(inspection.version)

    def get_device_bytes(self, inspection: AdapterInspection) -> int | None:
        return device_bytes(inspection.version)

    def get_is_estimated(self, inspection: AdapterInspection) -> bool:
        return is_estimated(inspection.version)


class VersionDoctorView(TenantAPIView):
    permissions: ClassVar = {"POST": Permission.ADAPTERS_WRITE}

    @extend_schema("version_doctor", responses=DoctorSerializer)
    def get(self, request: Request, name: str, number: int) -> Response:
        """Return statistics of the weights, and how a worker's numbers compare with PEFT's."""
        version = services.adapter_version_get(name=name, number=number)
        return Response(DoctorSerializer(services.adapter_inspection_get(version=version)).data)

    @extend_schema("version_inspect", request=None, responses={202: DoctorSerializer})
    def post(self, request: Request, name: str, number: int) -> Response:
        """Have a ready version inspected again, or for the first time.

        A mismatch rejects a version that is not live and that no alias names. 409
        `version_not_ready`; 503 `no_inspector`.
        """
        version = services.adapter_version_get(name=name, number=number)
        inspection = probing.inspection_request(version)
        return Response(DoctorSerializer(inspection).data, status=202)
