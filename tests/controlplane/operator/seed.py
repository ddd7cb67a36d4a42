"""Rows of thousands of tenants, copied inside the database: a row of the ORM's, times a number."""

from __future__ import annotations

from typing import Any

import psycopg
from django.conf import settings
from django.db import connection, models

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import ApiKey, Membership, Tenant, User
from controlplane.training.models import Dataset, TrainingRun
from controlplane.usage.models import UsageRecord

#: An id of version 7, later for each `i`; `{}` milliseconds lie between two.
_ID = """(lpad(to_hex((extract(epoch from now()) * 1000)::bigint - {} * (1000000 - i)), 12, '0')
    || '70008000' || lpad(to_hex(i), 12, '0'))::uuid"""


def seed(*, tenants: int, adapters: int, requests: int) -> str:
    """Fill the tables; each adapter has two versions. -> the slug of a tenant with all of them."""
    with all_tenants(reason="test"):
        first = Tenant.objects.create(slug="tenant-00000", name="Tenant")
        _copy(first, tenants - 1, slug="'tenant-' || lpad(i::text, 5, '0')")
        person = User.objects.create_user(email="person-00000@example.com")
        _copy(person, tenants - 1, email="'person-' || lpad(i::text, 5, '0') || '@example.com'")
    base = BaseModel.objects.create(name="tiny", revision="0" * 64, config={}, context_length=64)
    with tenant_scope(first.id):
        member = Membership.objects.create(user=person)
        adapter = Adapter.objects.create(name="adapter-0", base_model=base)
        version = AdapterVersion.objects.create(adapter=adapter, number=1, digest="0" * 64)
        key = ApiKey.objects.create(public_id="key_0", name="key-0", secret_hmac=b"x", last4="abcd")
        dataset = Dataset.objects.create(name="data-0", sha256="0" * 64, num_bytes=1, num_rows=1)
        run = TrainingRun.objects.create(adapter=adapter, dataset=dataset)
        said = {"request_id": "req_0", "model": "adapter-0", "base_model": "tiny"}
        request = InferenceRequest.objects.create(
            **said, worker_id="w", finish_reason="stop", accepted_at=first.created_at
        )
        usage = UsageRecord.objects.create(
            **said,
            prompt_tokens=1,
            completion_tokens=1,
            finish_reason="stop",
            occurred_at=first.created_at,
        )
    with all_tenants(reason="test"):
        tenant = _one_of("tenants_tenant", tenants)
        person_id = _one_of("tenants_user", tenants)
        _copy(member, tenants - 1, tenant_id=tenant, user_id=person_id)
        _copy(key, tenants * 2, tenant_id=tenant, public_id="'key_' || i", name="'key-' || i")
        _copy(adapter, adapters - 1, tenant_id=tenant, name="'adapter-' || i")
        owner = _one_of("adapters_adapter", adapters)
        for number in (2, 3):
            _copy(
                version,
                adapters,
                adapter_id=owner,
                tenant_id=f"(select tenant_id from adapters_adapter where id = {owner})",
                number=str(number),
                digest="md5(i::text) || md5(i::text)",
                id=_ID.format(number),
            )
        _copy(dataset, adapters, tenant_id=tenant, name="'data-' || i")
        # Adapter, dataset and tenant of a number belong together.
        data = _one_of("training_dataset", adapters)
        ended = {"tenant_id": tenant, "dataset_id": data, "status": "'succeeded'"}
        _copy(run, adapters - 1, adapter_id=owner, **ended)
        hashed = "'req_' || md5(i::text)"
        at = "now() - i * interval '10 second'"
        _copy(request, requests, tenant_id=tenant, request_id=hashed, accepted_at=at)
        _copy(usage, requests, tenant_id=tenant, request_id=hashed, occurred_at=at)
    with owners_connection() as owners:
        owners.execute("vacuum analyze")
    return first.slug


def _one_of(table: str, number: int) -> str:
    """SQL for an id of the table, another one for each of the first `number` rows."""
    return f"(array(select id from {table} order by id))[1 + mod(i - 1, {number})]"


def _copy(row: models.Model, times: int, /, **changed: str) -> None:
    """Insert the row `times` times more, with SQL expressions of `i` for some columns."""
    changed = {"id": _ID.format(10), **changed}
    columns = [field.column for field in row._meta.concrete_fields]
    values = ", ".join(changed.get(column, f'r."{column}"') for column in columns)
    names = ", ".join(f'"{column}"' for column in columns)
    table = row._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"insert into {table} ({names}) select {values} from {table} r, "
            f"generate_series(1, {times}) i where r.id = %s",
            [row.pk],
        )


def owners_connection() -> psycopg.Connection[Any]:
    """A connection of the tables' owner to the database of the tests."""
    owner: dict[str, Any] = settings.DATABASE_OWNER
    return psycopg.connect(
        host=owner["HOST"],
        port=owner["PORT"],
        user=owner["USER"],
        password=owner["PASSWORD"],
        dbname=connection.settings_dict["NAME"],
        autocommit=True,
    )
