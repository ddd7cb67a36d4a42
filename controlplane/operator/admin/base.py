"""Base classes of the operator's pages."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from django.contrib import admin
from django.db import models, transaction
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.text import capfirst
from unfold.admin import ModelAdmin

from controlplane.events.audit.services import record
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

    def get_list_display(self, request: HttpRequest) -> Sequence[Any]:
        return [self._legible(name) for name in super().get_list_display(request)]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Sequence[Any]:
        return [self._legible(name) for name in super().get_fields(request, obj)]

    def _legible(self, name: Any) -> Any:
        """Return a display that rounds the field's numbers, if it has floats; else its name."""
        fields = {field.name: field for field in self.model._meta.fields}
        for kind, text in ((models.FloatField, float_text), (models.JSONField, json_text)):
            if isinstance(fields.get(name), kind):
                return display(name, text)
        return name

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@functools.cache
def display(name: str, text: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a column, or a field of a page, that shows a model's field as `text` writes it."""

    @admin.display(description=capfirst(name.replace("_", " ")))
    def show(row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else text(value)

    return show


def float_text(value: float) -> str:
    return f"{value:,.1f}"


def json_text(value: Any) -> str:
    """Return JSON as HTML, its floats with four significant digits."""
    return format_html("<pre>{}</pre>", json.dumps(_shortened(value), indent=2, ensure_ascii=False))


def _shortened(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    return [_shortened(each) for each in value] if isinstance(value, list) else value
