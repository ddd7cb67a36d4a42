"""/v1/batches."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponseBase, JsonResponse

from controlplane.batches import services
from controlplane.batches.models import Batch
from controlplane.gateway import callers
from controlplane.gateway.batches.bodies import BatchBody, batch_body
from controlplane.gateway.row_views import as_caller, idempotent, list_page
from controlplane.gateway.views import gateway_view
from controlplane.inference.parsing import parse_body
from controlplane.infra.threads import query_in_thread
from controlplane.tenants.auth import authorize
from controlplane.tenants.permissions import Permission

MAX_PAGE = 100


@gateway_view("GET", "POST")
async def batches(request: HttpRequest) -> HttpResponseBase:
    if request.method == "GET":
        principal = await callers.authenticate(request, Permission.BATCHES_READ)

        def load() -> dict[str, object]:
            rows = Batch.objects.all()
            return list_page(request, rows, batch_body, prefix=Batch.PREFIX, max_limit=MAX_PAGE)

        return JsonResponse(await query_in_thread(as_caller(request, principal, load)))
    principal = await callers.authenticate(request, Permission.BATCHES_WRITE)
    authorize(principal, Permission.FILES_READ)  # it reads a file
    authorize(principal, Permission.INFER)
    content = request.read()
    body = parse_body(BatchBody, content)
    expires = body.output_expires_after

    def create() -> dict[str, object]:
        batch = services.batch_create(
            principal=principal,
            input_file_id=body.input_file_id,
            endpoint=body.endpoint,
            metadata=body.metadata,
            output_expires_s=expires.seconds if expires else None,
        )
        return batch_body(batch)

    return await query_in_thread(idempotent(request, principal, content, create))


@gateway_view("GET")
async def batch_detail(request: HttpRequest, batch_id: str) -> HttpResponseBase:
    principal = await callers.authenticate(request, Permission.BATCHES_READ)
    batch = await query_in_thread(
        as_caller(request, principal, lambda: services.batch_get(batch_id))
    )
    return JsonResponse(batch_body(batch))


@gateway_view("POST")
async def batch_cancel(request: HttpRequest, batch_id: str) -> HttpResponseBase:
    principal = await callers.authenticate(request, Permission.BATCHES_WRITE)
    batch = await query_in_thread(
        as_caller(request, principal, lambda: services.batch_cancel(services.batch_get(batch_id)))
    )
    return JsonResponse(batch_body(batch))
