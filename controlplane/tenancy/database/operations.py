"""Protect tenant tables: row-level security, and foreign keys that include the tenant.

A migration that makes a `TenantModel` ends with one line:

    operations = [..., TenantTables("Invite")]

and one that adds a foreign key between tenant tables later, with

    operations = [..., TenantReference("Invite", "adapter")]
"""

from __future__ import annotations

from typing import Any

from django.apps.registry import Apps
from django.db import models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState

from controlplane.tenancy.scope import OPERATOR_ROLE

#: True for the rows of the tenant in scope; false for all rows when the setting is empty or unset.
IS_OURS = "tenant_id = nullif(current_setting('lorikeet.tenant', true), '')::uuid"
#: By policy name: the statements it is for, and its condition.
POLICIES = {
    "tenant_select": ("for select", f"using ({IS_OURS})"),
    "tenant_insert": ("for insert", f"with check ({IS_OURS})"),
    "tenant_update": ("for update", f"using ({IS_OURS}) with check ({IS_OURS})"),
    "tenant_delete": ("for delete", f"using ({IS_OURS})"),
    "operator_all": (f"for all to {OPERATOR_ROLE}", "using (true) with check (true)"),
}

_Model = type[models.Model]


class _RowSecurityOperation(Operation):
    """Changes the database, not the state of the models."""

    reversible = True

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        pass


class TenantTables(_RowSecurityOperation):
    """Protect the tables of tenant models with row-level security.

    Each table gets ENABLE and FORCE row-level security with a policy for every verb, a unique key
    (tenant_id, id), and for every foreign key to another tenant table a second one that includes
    the tenant: foreign key checks ignore policies, and a row must not point at another tenant's.

    model_names  models of the migration's app
    """

    def __init__(self, *model_names: str) -> None:
        self.model_names = model_names

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        found = self._models(app_label, to_state.apps)
        for model in found:
            _make_key(schema_editor, model)
            _enable_row_security(schema_editor, model)
        for model in found:
            for field in tenant_references(model):
                _make_key(schema_editor, field.related_model)
                _make_reference(schema_editor, model, field)

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        found = self._models(app_label, from_state.apps)
        for model in found:
            for field in tenant_references(model):
                _drop_reference(schema_editor, model, field)
        for model in found:
            table = model._meta.db_table
            for policy in POLICIES:
                schema_editor.execute(f'drop policy {policy} on "{table}"')
            schema_editor.execute(f'alter table "{table}" no force row level security')
            schema_editor.execute(f'alter table "{table}" disable row level security')
            schema_editor.execute(f'drop index if exists "{_key_name(model)}"')

    def _models(self, app_label: str, apps: Apps) -> list[_Model]:
        return [apps.get_model(app_label, name) for name in self.model_names]

    def describe(self) -> str:
        return f"Protect {', '.join(self.model_names)} with row-level security"


class TenantReference(_RowSecurityOperation):
    """Add the tenant to a foreign key between two tenant tables."""

    def __init__(self, model_name: str, field_name: str) -> None:
        self.model_name = model_name
        self.field_name = field_name

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        model = to_state.apps.get_model(app_label, self.model_name)
        field = _foreign_key(model, self.field_name)
        _make_key(schema_editor, field.related_model)
        _make_reference(schema_editor, model, field)

    def database_backwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        model = from_state.apps.get_model(app_label, self.model_name)
        _drop_reference(schema_editor, model, _foreign_key(model, self.field_name))

    def describe(self) -> str:
        return f"Keep {self.model_name}.{self.field_name} within the tenant"


def tenant_references(model: _Model) -> list[models.ForeignKey[Any, Any]]:
    """Return a model's foreign keys to tenant tables; works with historical models, too."""
    return [
        field
        for field in model._meta.local_concrete_fields
        if isinstance(field, models.ForeignKey) and _is_tenant_table(field.related_model)
    ]


def reference_name(model: _Model, field: models.Field[Any, Any]) -> str:
    """Return the name of the foreign key that includes the tenant."""
    return f"{model._meta.db_table}_{field.column}_tenant"


def _is_tenant_table(model: Any) -> bool:
    return any(field.name == "tenant" for field in model._meta.local_fields)


def _foreign_key(model: _Model, name: str) -> models.ForeignKey[Any, Any]:
    field = model._meta.get_field(name)
    assert isinstance(field, models.ForeignKey)
    return field


def _key_name(model: _Model) -> str:
    return f"{model._meta.db_table}_tenant_key"


def _make_key(schema_editor: BaseDatabaseSchemaEditor, model: Any) -> None:
    # Also made for a table that is referenced before it is protected itself.
    name, table = _key_name(model), model._meta.db_table
    if _is_partitioned(schema_editor, table):
        return  # nothing refers to it, and the key would need the partitions' column
    schema_editor.execute(
        f'create unique index if not exists "{name}" on "{table}" (tenant_id, id)'
    )


def _is_partitioned(schema_editor: BaseDatabaseSchemaEditor, table: str) -> bool:
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(
            "select from pg_partitioned_table where partrelid = to_regclass(%s)", (table,)
        )
        return cursor.fetchone() is not None


def _enable_row_security(schema_editor: BaseDatabaseSchemaEditor, model: _Model) -> None:
    table = model._meta.db_table
    schema_editor.execute(f'alter table "{table}" enable row level security')
    schema_editor.execute(f'alter table "{table}" force row level security')
    for name, (purpose, condition) in POLICIES.items():
        schema_editor.execute(f'create policy {name} on "{table}" {purpose} {condition}')


def _make_reference(
    schema_editor: BaseDatabaseSchemaEditor, model: _Model, field: models.ForeignKey[Any, Any]
) -> None:
    table, name = model._meta.db_table, reference_name(model, field)
    target = field.related_model._meta.db_table  # type: ignore[union-attr]
    schema_editor.execute(
        f'alter table "{table}" add constraint "{name}" '
        f'foreign key (tenant_id, "{field.column}") references "{target}" (tenant_id, id) '
        "deferrable initially deferred"
    )


def _drop_reference(
    schema_editor: BaseDatabaseSchemaEditor, model: _Model, field: models.ForeignKey[Any, Any]
) -> None:
    name = reference_name(model, field)
    table = model._meta.db_table
    schema_editor.execute(f'alter table "{table}" drop constraint "{name}"')
