"""Base classes of the operator's pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import models, transaction
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from controlplane.audit.services import record
from controlplane.operator.admin.lists import BoundedList


class AuditedAdmin(BoundedList, ModelAdmin):
    """Rows that operators change; the audit trail records each change with its fields' names."""

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        if not change or form.changed_data:
            after = {"fields": sorted(form.changed_data)}
            record("changed" if change else "created", obj, after=after)

    def save_formset(self, request: HttpRequest, form: Any, formset: Any, change: bool) -> None:
        super().save_formset(request, form, formset, change)
        for row in formset.new_objects:
            record("created", row)
        for row, fields in formset.changed_objects:
            record("changed", row, after={"fields": sorted(fields)})
        for row in formset.deleted_objects:
            record("deleted", row)

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        # Django's page for setting a password does not call `save_model`, only this.
        if request.path.endswith("/password/"):
            with transaction.atomic():
                record("password_set", obj)
        return super().log_change(request, obj, message)

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        with transaction.atomic():
            record("deleted", obj)
            super().delete_model(request, obj)

    def delete_queryset(self, request: HttpRequest, queryset: Any) -> None:
        with transaction.atomic():
            rows: Sequence[models.Model] = list(queryset)
            for row in rows:
                record("deleted", row)
            super().delete_queryset(request, queryset)


class ReadOnlyAdmin(BoundedList, ModelAdmin):
    """Rows that the platform writes: operators can read them and run actions on them."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
