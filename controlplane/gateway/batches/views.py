"""/v1/batches."""

from __future__ import annotations

from typing import ClassVar

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.files.batches import services
from controlplane.files.batches.models import Batch
from controlplane.gateway.batches.bodies import BatchBody, BatchSerializer
from controlplane.gateway.rest.paging import Paging, page, page_of
from controlplane.gateway.row_views import GatewayAPIView
from controlplane.tenants.auth import authorize
from controlplane.tenants.permissions import Permission

_PAGING = Paging(id_prefix=Batch.PREFIX, has_order=True)


class BatchesView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.BATCHES_READ, "POST": Permission.BATCHES_WRITE}

    @extend_schema("gateway_batches", _PAGING.parameters(), responses=page_of(BatchSerializer))
    def get(self, request: Request) -> Response:
        """List the tenant's batches."""
        return page(request, services.batches_list(), BatchSerializer, paging=_PAGING)

    @extend_schema("gateway_batch_create", request=BatchBody, responses=BatchSerializer)
    def post(self, request: Request) -> Response:
        """Have a file of requests answered within a day."""
        authorize(self.principal, Permission.FILES_READ)  # it reads a file
        authorize(self.principal, Permission.INFER)
        body = self.body_of_write(BatchBody)
        expires = body.output_expires_after
        batch = services.batch_create(
            principal=self.principal,
            input_file_id=body.input_file_id,
            endpoint=body.endpoint,
            metadata=body.metadata,
            output_expires_s=expires.seconds if expires else None,
        )
        return Response(BatchSerializer(batch).data)


class BatchView(GatewayAPIView):
    permissions: ClassVar = {"GET": Permission.BATCHES_READ}

    @extend_schema("gateway_batch", responses=BatchSerializer)
    def get(self, request: Request, batch_id: str) -> Response:
        """One batch."""
        return Response(BatchSerializer(services.batch_get(batch_id)).data)


class BatchCancelView(GatewayAPIView):
    permissions: ClassVar = {"POST": Permission.BATCHES_WRITE}

    @extend_schema("gateway_batch_cancel", request=None, responses=BatchSerializer)
    def post(self, request: Request, batch_id: str) -> Response:
        """Stop a batch; what was answered stays."""
        batch = services.batch_cancel(services.batch_get(batch_id))
        return Response(BatchSerializer(batch).data)
