"""The record of deleted tenants, and the page that asks before one is deleted."""

from __future__ import annotations

import uuid
from typing import Any

from django.contrib import admin, messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse

from controlplane.deletion.models import TenantDeletion
from controlplane.deletion.tenants import tenant_delete, tenant_restore
from controlplane.errors import ApiError
from controlplane.operator.admin.base import ReadOnlyAdmin
from controlplane.tenants.models import Tenant


@admin.register(TenantDeletion)
class TenantDeletionAdmin(ReadOnlyAdmin):
    list_display = ("slug", "status", "requested_by", "requested_at", "due_at", "finished_at")
    list_filter = ("status",)
    ordering = ("-pk",)  # ids are ordered by time
    search_prefixes = ("slug",)  # no index needed: one row for each deleted tenant
    search_tenants = False

    def get_urls(self) -> list[URLPattern]:
        ask = path(
            "tenant/<uuid:tenant_id>/",
            self.admin_site.admin_view(self.ask),
            name="deletion_tenantdeletion_ask",
        )
        return [ask, *super().get_urls()]

    def ask(self, request: HttpRequest, tenant_id: uuid.UUID) -> HttpResponse:
        """Ask for the tenant's slug; then schedule its deletion, or undo that."""
        tenants = Tenant.objects.exclude(status=Tenant.Status.DELETED)
        tenant = tenants.filter(pk=tenant_id).first()
        if tenant is None:
            raise Http404
        problem = ""
        if request.method == "POST":
            try:
                self._change(request, tenant)
            except ApiError as error:
                problem = error.message
            else:
                return redirect(reverse("admin:deletion_tenantdeletion_changelist"))
        open_one = TenantDeletion.objects.filter(
            tenant_id=tenant.pk, status__in=TenantDeletion.OPEN
        )
        context: dict[str, Any] = {
            **self.admin_site.each_context(request),
            "title": f"Delete {tenant.slug}",
            "tenant": tenant,
            "deletion": open_one.first(),
            "problem": problem,
        }
        return TemplateResponse(
            request, "operator/delete_tenant.html", context, status=409 if problem else 200
        )

    @staticmethod
    def _change(request: HttpRequest, tenant: Tenant) -> None:
        if "restore" in request.POST:
            tenant_restore(tenant=tenant)
            messages.success(request, f"{tenant.slug} is restored.")
            return
        deletion = tenant_delete(tenant=tenant, confirm=request.POST.get("confirm", "").strip())
        text = (
            f"{tenant.slug} is suspended; its data is deleted from {deletion.due_at:%Y-%m-%d} on."
        )
        messages.success(request, text)
