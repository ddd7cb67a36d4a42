"""/ops/v1: the operators' API, by session or service key. Tenants' keys are refused."""

from __future__ import annotations

import uuid
from typing import Any

from django.db import transaction
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.adapters.models import BaseModel
from controlplane.adapters.services import base_model_activate, base_model_shutdown_set
from controlplane.deletion.models import TenantDeletion
from controlplane.deletion.tenants import tenant_delete, tenant_restore
from controlplane.errors import InvalidRequest, NotFound, from_fields, require
from controlplane.gateway.rest.paging import PAGE_PARAMETERS, page, page_of, page_of_items
from controlplane.management.account.limits import (
    LimitSerializer,
    QuotaSerializer,
    QuotaSetSerializer,
    RatesSerializer,
)
from controlplane.management.account.people import TenantSerializer
from controlplane.management.adapters.adapters import BaseModelSerializer
from controlplane.management.base import StrictSerializer
from controlplane.management.fields import ChoiceField
from controlplane.operator import pool, provisioning
from controlplane.operator.access import OperatorAPIView as OperatorAPIView
from controlplane.operator.service_keys.scopes import Scope
from controlplane.operator.tenant_document import ProvisionedSerializer, TenantDocumentSerializer
from controlplane.queue import dead_letters
from controlplane.queue.models import DeadLetter
from controlplane.queue.workers import workers
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import services
from controlplane.tenants.models import Tenant, is_slug
from controlplane.usage.limits import quotas
from controlplane.usage.limits.services import rate_limit_set


class TenantCreateSerializer(StrictSerializer):
    slug = serializers.CharField(max_length=63, help_text="It can never change.")
    name = serializers.CharField(max_length=200)


class TenantChangeSerializer(StrictSerializer):
    name = serializers.CharField(max_length=200, required=False)
    status = ChoiceField([status.value for status in services.SETTABLE], required=False)


class TenantDeleteSerializer(StrictSerializer):
    confirm = serializers.CharField(max_length=63, help_text="The tenant's slug, again.")
    grace_days = serializers.IntegerField(
        required=False,
        min_value=0,
        max_value=90,
        help_text="Days in which it can be restored; 0: none. Default: the installation's.",
    )


class BaseModelChangeSerializer(StrictSerializer):
    is_active = serializers.BooleanField(required=False, help_text="Whether requests may use it.")
    shutdown_date = serializers.DateField(
        required=False,
        allow_null=True,
        help_text="From this day (UTC) requests for it are refused; null: never.",
    )


class OperatorBaseModelSerializer(BaseModelSerializer):
    class Meta(BaseModelSerializer.Meta):
        fields = (*BaseModelSerializer.Meta.fields, "is_active")  # type: ignore[assignment]


class DeletionSerializer(serializers.ModelSerializer[TenantDeletion]):
    object = serializers.CharField(default="tenant_deletion", read_only=True)
    tenant = serializers.CharField(source="slug", help_text="The slug that it had.")
    steps = serializers.ListField(
        child=serializers.CharField(), help_text="The finished steps, in their order."
    )
    counts = serializers.DictField(
        child=serializers.IntegerField(),
        help_text="Numbers of deleted rows by table, objects, people, Redis keys.",
    )
    num_bytes = serializers.IntegerField(help_text="Bytes of the deleted objects.")
    error = serializers.CharField(help_text="The error of the last attempt; empty: none.")

    class Meta:
        model = TenantDeletion
        fields = (
            "id", "object", "tenant", "tenant_id", "status", "requested_by", "requested_at",
            "due_at", "started_at", "finished_at", "restored_at", "steps", "counts",
            "num_bytes", "error",
        )  # fmt: skip


class WorkerSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="worker", read_only=True)
    id = serializers.CharField(source="heartbeat.worker_id")
    boot_id = serializers.CharField(source="heartbeat.boot_id")
    base_model = serializers.CharField(source="heartbeat.base_model")
    device = serializers.CharField(source="heartbeat.device")
    is_alive = serializers.BooleanField()
    is_ready = serializers.BooleanField()
    draining = serializers.BooleanField(source="heartbeat.draining")
    running = serializers.IntegerField(source="heartbeat.running")
    waiting = serializers.IntegerField(source="heartbeat.waiting")
    tokens_per_s = serializers.FloatField(source="heartbeat.tokens_per_s")
    precision = serializers.JSONField(
        source="heartbeat.precision",
        help_text="Of the base's weights, keys and values, and what it changes: docs/models.md.",
    )
    silent_s = serializers.FloatField(help_text="Seconds since its last heartbeat.")


class QueueSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="queue", read_only=True)
    base_model = serializers.CharField()
    waiting_requests = serializers.IntegerField()
    waiting_tokens = serializers.IntegerField()
    interactive_tenants = serializers.IntegerField()
    batch_tenants = serializers.IntegerField()


class DeadLetterSerializer(serializers.ModelSerializer[DeadLetter]):
    """A dead letter without its job: operators need not read a tenant's prompt."""

    object = serializers.CharField(default="dead_letter", read_only=True)
    tenant = serializers.CharField(source="tenant.slug")

    class Meta:
        model = DeadLetter
        fields = (
            "id", "object", "tenant", "request_id", "model", "worker_id", "reason",
            "created_at", "requeued_at", "requeued_as",
        )  # fmt: skip


class QuarantineSerializer(serializers.Serializer[Any]):
    object = serializers.CharField(default="quarantined_adapter", read_only=True)
    digest = serializers.CharField()
    since = serializers.DateTimeField()


_DRY_RUN = OpenApiParameter("dry_run", bool, description="Report the changes, and make none.")


class _TenantsAPIView(OperatorAPIView):
    readers = (Scope.TENANTS_READ,)
    writers = (Scope.TENANTS_WRITE,)


class _PoolAPIView(OperatorAPIView):
    readers = (Scope.POOL_READ,)
    writers = (Scope.POOL_WRITE,)


class TenantsView(_TenantsAPIView):
    @extend_schema("ops_tenants_list", PAGE_PARAMETERS, responses=page_of(TenantSerializer))
    def get(self, request: Request) -> Response:
        """List all tenants, newest first."""
        rows = Tenant.objects.exclude(status=Tenant.Status.DELETED)
        return page(request, rows, TenantSerializer)

    @extend_schema(
        "ops_tenants_create", request=TenantCreateSerializer, responses={201: TenantSerializer}
    )
    def post(self, request: Request) -> Response:
        """Make a tenant. `PUT tenants/{slug}` also invites its owner."""
        body = TenantCreateSerializer.parsed(request)
        tenant = services.tenant_create(slug=body["slug"], name=body["name"])
        self.acted_for = tenant.slug
        return Response(TenantSerializer(tenant).data, status=201)


class TenantView(_TenantsAPIView):
    # For PUT, because its answer has secrets that are shown once.
    kept_methods = ("POST", "PUT")

    def check_scope(self, request: Request) -> None:
        if request.method == "DELETE":
            self.operator.check()  # as for `restore`, which undoes it: only people
        super().check_scope(request)

    @extend_schema("ops_tenants_retrieve", responses=TenantSerializer)
    def get(self, request: Request, slug: str) -> Response:
        return Response(TenantSerializer(tenant_get(slug)).data)

    @extend_schema("ops_tenants_update", request=TenantChangeSerializer, responses=TenantSerializer)
    def patch(self, request: Request, slug: str) -> Response:
        """Rename a tenant, suspend it (its keys and people are refused) or reactivate it."""
        tenant = tenant_get(slug)
        body = TenantChangeSerializer.parsed(request)
        if "name" in body:
            tenant = services.tenant_update(tenant=tenant, name=body["name"])
        if "status" in body:
            tenant = services.tenant_status_set(tenant=tenant, status=body["status"])
        return Response(TenantSerializer(tenant).data)

    @extend_schema(
        "ops_tenants_provision",
        parameters=[_DRY_RUN],
        request=TenantDocumentSerializer,
        responses={200: ProvisionedSerializer, 201: ProvisionedSerializer},
    )
    def put(self, request: Request, slug: str) -> Response:
        """Bring a tenant to the state that the document describes: completely, or not at all.

        Parts that it leaves out stay as they are; nothing is removed. The same document again
        changes nothing. `keys` also need the scope keys:write, `adapters` adapters:write,
        `schedules` training:write. 201: the tenant is new.
        """
        self.acted_for = None  # the provisioning records what it changed
        try:
            document = TenantDocumentSerializer.parsed(request)
        except serializers.ValidationError as error:
            raise from_fields(error) from error
        outcome = provisioning.tenant_provision(
            slug=slug, document=document, by=self.operator, is_dry_run=_is_dry_run(request)
        )
        is_new = not outcome.is_dry_run and outcome.parts[0].result == provisioning.Result.CREATED
        return Response(ProvisionedSerializer(outcome).data, status=201 if is_new else 200)

    @extend_schema(
        "ops_tenants_delete", request=TenantDeleteSerializer, responses={202: DeletionSerializer}
    )
    def delete(self, request: Request, slug: str) -> Response:
        """Suspend a tenant now, and delete all its data when the grace period is over.

        The body is {"confirm": the slug again, "grace_days": 0 to 90, or left out for the
        installation's}. Until then `restore` undoes it.
        """
        tenant = tenant_get(slug)
        body = TenantDeleteSerializer.parsed(request)
        deletion = tenant_delete(tenant=tenant, **body)
        return Response(DeletionSerializer(deletion).data, status=202)


class TenantRestoreView(OperatorAPIView):
    @extend_schema("ops_tenants_restore", request=None, responses=TenantSerializer)
    def post(self, request: Request, slug: str) -> Response:
        """Undo a tenant's deletion within its grace period. 409 if there is none, or it began."""
        return Response(TenantSerializer(tenant_restore(tenant=tenant_get(slug))).data)


class DeletionsView(OperatorAPIView):
    @extend_schema("ops_deletions_list", PAGE_PARAMETERS, responses=page_of(DeletionSerializer))
    def get(self, request: Request) -> Response:
        """List the deletions of tenants, newest first: scheduled, running, done and restored."""
        return page(request, TenantDeletion.objects.all(), DeletionSerializer)


class TenantLimitsView(_TenantsAPIView):
    @extend_schema("ops_tenants_limits_set", request=RatesSerializer, responses=LimitSerializer)
    def put(self, request: Request, slug: str) -> Response:
        """Set the limits of a whole tenant, which it cannot change.

        Fields left out stay as they are; null removes a limit.
        """
        tenant = tenant_to_change(slug)
        body = RatesSerializer.parsed(request)
        with tenant_scope(tenant.id):
            row = rate_limit_set(**body)
        return Response(LimitSerializer(row).data)


class TenantQuotaView(_TenantsAPIView):
    @extend_schema("ops_tenants_quota", responses=QuotaSerializer)
    def get(self, request: Request, slug: str) -> Response:
        """Return a tenant's quotas and their use."""
        with tenant_scope(tenant_get(slug).id):
            return Response(QuotaSerializer(quotas.quota_state()).data)

    @extend_schema("ops_tenants_quota_set", request=QuotaSetSerializer, responses=QuotaSerializer)
    def put(self, request: Request, slug: str) -> Response:
        """Set a tenant's quotas. Its present data stays, and so do quotas that are left out."""
        tenant = tenant_to_change(slug)
        body = QuotaSetSerializer.parsed(request)
        with tenant_scope(tenant.id):
            quotas.quota_set(**body)
            return Response(QuotaSerializer(quotas.quota_state()).data)


class BaseModelsView(OperatorAPIView):
    readers = (Scope.POOL_READ, Scope.TENANTS_READ, Scope.ADAPTERS_WRITE)
    writers = (Scope.POOL_WRITE,)

    @extend_schema(
        "ops_base_models_list", PAGE_PARAMETERS, responses=page_of(OperatorBaseModelSerializer)
    )
    def get(self, request: Request) -> Response:
        """List all base models, also those that are switched off."""
        return page(request, BaseModel.objects.all(), OperatorBaseModelSerializer)


class BaseModelView(_PoolAPIView):
    @extend_schema(
        "ops_base_models_update",
        request=BaseModelChangeSerializer,
        responses=OperatorBaseModelSerializer,
    )
    def patch(self, request: Request, name: str) -> Response:
        """Switch a base model and its adapters off or on, or set the shutdown date."""
        row = BaseModel.objects.filter(name=name).first() if is_slug(name) else None
        row = require(row, "There is no such base model.")
        body = BaseModelChangeSerializer.parsed(request)
        with transaction.atomic():
            if "is_active" in body:
                base_model_activate(base_model=row, is_active=body["is_active"])
            if "shutdown_date" in body:
                base_model_shutdown_set(base_model=row, shutdown_date=body["shutdown_date"])
        return Response(OperatorBaseModelSerializer(row).data)


class WorkersView(_PoolAPIView):
    @extend_schema("ops_workers_list", PAGE_PARAMETERS, responses=page_of(WorkerSerializer))
    def get(self, request: Request) -> Response:
        """List the pool's workers by name, with their last heartbeat."""
        found = sorted(workers(), key=lambda worker: worker.heartbeat.worker_id)
        return page_of_items(request, found, WorkerSerializer, cursor="id")


class WorkerDrainView(_PoolAPIView):
    @extend_schema("ops_workers_drain", request=None, responses={202: WorkerSerializer})
    def post(self, request: Request, worker_id: str) -> Response:
        """Let a worker finish its requests, take no more, and exit. A restart ends the drain."""
        pool.worker_drain(worker_id=worker_id)
        return Response(WorkerSerializer(pool.worker_get(worker_id=worker_id)).data, status=202)

    @extend_schema("ops_workers_resume", responses={202: WorkerSerializer})
    def delete(self, request: Request, worker_id: str) -> Response:
        """Let a draining worker take requests again, if it still has some of its own."""
        pool.worker_resume(worker_id=worker_id)
        return Response(WorkerSerializer(pool.worker_get(worker_id=worker_id)).data, status=202)


class QueuesView(_PoolAPIView):
    @extend_schema("ops_queues_list", PAGE_PARAMETERS, responses=page_of(QueueSerializer))
    def get(self, request: Request) -> Response:
        """List the waiting requests and tokens, by base model."""
        return page_of_items(request, pool.queues(), QueueSerializer, cursor="base_model")


class DeadLettersView(_PoolAPIView):
    @extend_schema(
        "ops_dead_letters_list", PAGE_PARAMETERS, responses=page_of(DeadLetterSerializer)
    )
    def get(self, request: Request) -> Response:
        """List requests that crashed every worker that ran them, newest first."""
        return page(request, DeadLetter.objects.select_related("tenant"), DeadLetterSerializer)


class DeadLetterView(_PoolAPIView):
    @extend_schema("ops_dead_letters_discard", responses={204: None})
    def delete(self, request: Request, letter_id: uuid.UUID) -> Response:
        """Delete a dead letter and its prompt. The tenant's audit trail records it."""
        if not dead_letters.dead_letter_discard(_letter(letter_id)):
            raise NotFound("There is no such dead letter.")
        return Response(status=204)


class DeadLetterRequeueView(_PoolAPIView):
    @extend_schema("ops_dead_letters_requeue", request=None, responses=DeadLetterSerializer)
    def post(self, request: Request, letter_id: uuid.UUID) -> Response:
        """Run the request again, once, in the batch class and with a new id."""
        dead_letters.dead_letter_requeue(_letter(letter_id))
        return Response(DeadLetterSerializer(_letter(letter_id)).data)


def _letter(letter_id: uuid.UUID) -> DeadLetter:
    """Return the letter with its tenant. Raises NotFound."""
    found = DeadLetter.objects.select_related("tenant").filter(pk=letter_id).first()
    return require(found, "There is no such dead letter.")


class QuarantineView(_PoolAPIView):
    @extend_schema("ops_quarantine_list", PAGE_PARAMETERS, responses=page_of(QuarantineSerializer))
    def get(self, request: Request) -> Response:
        """List adapters that are not served because they crashed workers, newest first."""
        rows: list[Any] = [
            {"digest": digest, "since": at} for digest, at in dead_letters.quarantined().items()
        ]
        rows.sort(key=lambda row: str(row["since"]), reverse=True)
        return page_of_items(request, rows, QuarantineSerializer, cursor="digest")


class QuarantinedAdapterView(_PoolAPIView):
    @extend_schema("ops_quarantine_release", responses={204: None})
    def delete(self, request: Request, digest: str) -> Response:
        """Release an adapter, so that it is served again."""
        if not dead_letters.quarantine_release(digest):
            raise NotFound("This adapter is not quarantined.")
        return Response(status=204)


def _is_dry_run(request: Request) -> bool:
    text = request.query_params.get("dry_run", "false")
    if text not in ("true", "false"):
        raise InvalidRequest("dry_run is true or false.", param="dry_run")
    return text == "true"


def tenant_get(slug: str) -> Tenant:
    """Return the tenant. Raises NotFound."""
    rows = Tenant.objects.exclude(status=Tenant.Status.DELETED)
    found = rows.filter(slug=slug).first() if is_slug(slug) else None
    return require(found, "There is no such tenant.")


def tenant_to_change(slug: str) -> Tenant:
    """Return the tenant. Raises NotFound, Conflict while it is being deleted."""
    tenant = tenant_get(slug)
    services.check_not_deleting(tenant)
    return tenant
