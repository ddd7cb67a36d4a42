"""Stop `manage.py` when a tenant model's table has no row-level security."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Tags, register
from django.db.migrations.loader import MigrationLoader

from controlplane.tenancy.database.operations import (
    TenantReference,
    TenantTables,
    tenant_references,
)
from controlplane.tenancy.scoping import TenantModel


@register(Tags.models)
def check_row_security(
    app_configs: Sequence[AppConfig] | None, **kwargs: Any
) -> list[CheckMessage]:
    """Return an error for each unprotected tenant model, and each foreign key between two."""
    tables, references = _protected()
    found: list[CheckMessage] = []
    for model in apps.get_models():
        if not issubclass(model, TenantModel):
            continue
        label = (model._meta.app_label, model._meta.model_name)
        if label not in tables:
            hint = f'end its migration with TenantTables("{model.__name__}")'
            message = "its rows are not behind row-level security"
            found.append(Error(message, hint=hint, obj=model, id="lorikeet.E001"))
            continue
        for field in tenant_references(model):
            if (*label, field.name) not in tables[label] | references:
                hint = f'end its migration with TenantReference("{model.__name__}", "{field.name}")'
                message = f"{field.name} may point at another tenant's row"
                found.append(Error(message, hint=hint, obj=model, id="lorikeet.E002"))
    return found


_Label = tuple[str, str | None]
_Reference = tuple[str, str | None, str]


def _protected() -> tuple[dict[_Label, set[_Reference]], set[_Reference]]:
    """Return what migrations protect: tables with their references, and references added later."""
    loader = MigrationLoader(None)
    tables: dict[_Label, set[_Reference]] = {}
    references: set[_Reference] = set()
    for key, migration in (loader.disk_migrations or {}).items():
        app_label = key[0]
        for operation in migration.operations:
            if isinstance(operation, TenantReference):
                name = operation.model_name.lower()
                references.add((app_label, name, operation.field_name))
            elif isinstance(operation, TenantTables):
                state = loader.project_state(key).apps
                for name in operation.model_names:
                    model = state.get_model(app_label, name)
                    label = (model._meta.app_label, model._meta.model_name)
                    tables[label] = {(*label, field.name) for field in tenant_references(model)}
    return tables, references
