"""/api/v1/adapters/{name}/residency: the places of an adapter's versions on the workers."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters import services
from controlplane.adapters.models import AdapterVersion
from controlplane.management.base import TenantAPIView
from controlplane.queue.placement.residency import Residency, residency, said

#: Number of versions in an answer: the newest ready ones, and the live one.
MAX_VERSIONS = 50


class PrefetchedSerializer(serializers.Serializer[Any]):
    workers = serializers.IntegerField(help_text="Workers that serve the base model.")
    ready = serializers.IntegerField(help_text="Number of these that had it on the GPU in time.")


class PlaceSerializer(serializers.Serializer[Any]):
    worker = serializers.CharField(help_text="A constant name without further meaning.")
    tier = serializers.ChoiceField(["gpu", "host", "disk", "cold"])
    pinned = serializers.BooleanField(help_text="Whether it stays while nobody asks for it.")
    seen_s = serializers.FloatField(help_text="Seconds since the worker reported it.")


class CountsSerializer(serializers.Serializer[Any]):
    gpu = serializers.IntegerField()
    host = serializers.IntegerField(help_text="In the memory of the worker's machine.")
    disk = serializers.IntegerField()
    cold = serializers.IntegerField(help_text="Not on the worker; it is in the object store.")


class VersionResidencySerializer(serializers.Serializer[Any]):
    version = serializers.IntegerField()
    digest = serializers.CharField()
    live = serializers.BooleanField()
    counts = CountsSerializer()
    workers = PlaceSerializer(many=True)


class ResidencySerializer(serializers.Serializer[Any]):
    object = serializers.CharField()
    adapter = serializers.CharField()
    workers = serializers.IntegerField(help_text="Workers that serve the base model.")
    versions = VersionResidencySerializer(many=True)


class ResidencyView(TenantAPIView):
    @extend_schema("adapter_residency", responses=ResidencySerializer)
    def get(self, request: Request, name: str) -> Response:
        """Return the places of the adapter's ready versions on each worker, by its last heartbeat.

        Those are 2 seconds apart. The newest 50 versions are listed, and the live one. A worker
        names the newest 512 adapters of its memory and of its disk; others count as cold.
        """
        adapter = services.adapter_get(name=name)
        rows = AdapterVersion.objects.allowed()
        rows = rows.filter(adapter=adapter, status=AdapterVersion.Status.READY)
        rows = rows.select_related("adapter__base_model")
        newest = list(rows.order_by("-number")[:MAX_VERSIONS])
        live_id = adapter.live_version_id
        if live_id is not None and all(version.pk != live_id for version in newest):
            newest += rows.filter(pk=live_id)
        found = residency(newest)
        body = {
            "object": "adapter_residency",
            "adapter": adapter.name,
            "workers": len(found[0].places) if found else 0,
            "versions": [_body(item, live_id) for item in found],
        }
        return Response(ResidencySerializer(body).data)


def _body(item: Residency, live_id: Any) -> dict[str, Any]:
    return {
        "version": item.version.number,
        "digest": item.version.digest,
        "live": item.version.pk == live_id,
        "counts": item.counts,
        "workers": [
            {
                "worker": place.worker,
                "tier": said(place.tier),
                "pinned": place.is_pinned,
                "seen_s": place.silent_s,
            }
            for place in item.places
        ],
    }
