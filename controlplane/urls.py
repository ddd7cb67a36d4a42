"""/v1 gateway, LoRAX's addresses · /api/v1 management · /ops/v1 operator · /console · /admin."""

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from drf_spectacular.views import SpectacularJSONAPIView, SpectacularSwaggerView

from contract.adapters.probe_server import ready_body
from controlplane.infra.health import readiness


def healthz(request: HttpRequest) -> HttpResponse:
    """Answer that this process runs; check no other server."""
    return HttpResponse("ok", content_type="text/plain")


def readyz(request: HttpRequest) -> HttpResponse:
    """Answer whether this process can serve, and which server is missing; without a key."""
    lacks = readiness.missing("database", "redis", "object store")
    body = ready_body(lacks)
    return HttpResponse(body, status=503 if lacks else 200, content_type="application/json")


urlpatterns = [
    path("", include("controlplane.gateway.lorax.urls")),
    path("healthz", healthz),
    path("readyz", readyz),
    path("v1/", include("controlplane.gateway.urls")),
    path("tinker/api/v1/", include("controlplane.gateway.tinker.urls")),
    path("console/", include("controlplane.console.signin.urls")),
    path("console/", include("controlplane.console.urls")),
    path("admin/", admin.site.urls),
    path("api/openapi.json", SpectacularJSONAPIView.as_view(), name="openapi"),
    path("api/docs", SpectacularSwaggerView.as_view(url_name="openapi")),
    path("api/v1/", include("controlplane.management.urls")),
    path("ops/v1/", include("controlplane.operator.urls")),
]

handler404 = "controlplane.infra.web.addresses.page_not_found"
handler500 = "controlplane.infra.web.addresses.server_error"
