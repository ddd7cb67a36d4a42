"""Row-level security: it holds with the application's scoping switched off."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.apps import apps
from django.db import (
    IntegrityError,
    ProgrammingError,
    close_old_connections,
    connection,
    connections,
    models,
    transaction,
)
from django.db.migrations.loader import MigrationLoader
from django.http import HttpRequest, JsonResponse
from django.test import AsyncClient
from django.urls import path

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.gateway import callers
from controlplane.inference import while_away
from controlplane.infra import circuit
from controlplane.tenancy.database import checks
from controlplane.tenancy.database.operations import (
    TenantTables,
    reference_name,
    tenant_references,
)
from controlplane.tenancy.database.ownership import as_owner
from controlplane.tenancy.scope import OPERATOR_ROLE, add_tenant
from controlplane.tenancy.scoping import TenantManager, TenantModel, all_tenants, tenant_scope
from controlplane.tenants import services
from controlplane.tenants.models import ApiKey, Membership
from controlplane.training.models import dataset_key
from tests.controlplane.conftest import Party, make_party

#: Everybody's: of each, why no tenant's data is in it.
GLOBAL_TABLES = {
    "tenants_tenant": "who the tenants are",
    "tenants_user": "a person may be in several tenants",
    "tenants_user_groups": "unused; Django's",
    "tenants_user_user_permissions": "unused; Django's",
    "adapters_basemodel": "the operator's, for all",
    "delivery_quarantine": "the operator's: adapters' digests, by pool",
    "deletion_tenantdeletion": "the platform's record of deleted tenants",
    "tenants_operatoridempotencyrecord": "operators' own writes",
    "service_keys_servicekey": "operators' credentials: only the operator's role sees a row",
    "account_emailaddress": "a person's addresses",
    "account_emailconfirmation": "unused: allauth's links are signed instead",
    "mfa_authenticator": "a person's second factors, encrypted",
    "socialaccount_socialaccount": "who a person is to the issuer",
    "socialaccount_socialapp": "unused: the issuer is in the settings",
    "socialaccount_socialtoken": "unused: no token is kept",
    "usersessions_usersession": "a person's sessions: from where, and since when",
    "auth_group": "unused; Django's",
    "auth_group_permissions": "unused; Django's",
    "auth_permission": "Django's",
    "django_admin_log": "what operators did on the admin pages",
    "django_content_type": "Django's",
    "django_migrations": "Django's",
    "django_session": "a person's, opened by a secret",
}
TENANT_MODELS = [model for model in apps.get_models() if issubclass(model, TenantModel)]


def rows_of(text: str, *parameters: object) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(text, parameters)
        return cursor.fetchall()


def partitions() -> list[str]:
    """The tables that hold the rows of partitioned ones."""
    found = rows_of(
        "select inhrelid::regclass::text from pg_inherits "
        "where inhparent in (select partrelid from pg_partitioned_table) "
        "and inhrelid in (select oid from pg_class where relkind = 'r')"
    )
    return [name for (name,) in found]


def unscope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the application's scoping off: every query asks for all tenants' rows."""
    monkeypatch.setattr(TenantManager, "get_queryset", models.Manager.get_queryset)
    monkeypatch.setattr(TenantModel, "save", models.Model.save)


@pytest.fixture
def unscoped(monkeypatch: pytest.MonkeyPatch) -> None:
    unscope(monkeypatch)


class TestCatalogue:
    def test_every_table_is_classified(self, db: None) -> None:
        found = {
            name
            for (name,) in rows_of("select tablename from pg_tables where schemaname = 'public'")
        }
        tenants = {model._meta.db_table for model in TENANT_MODELS} | set(partitions())
        assert found == tenants | set(GLOBAL_TABLES) & found
        assert not tenants & set(GLOBAL_TABLES)

    @pytest.mark.parametrize("model", TENANT_MODELS, ids=lambda model: model.__name__)
    def test_every_tenant_table_has_its_policies(self, db: None, model: Any) -> None:
        self.check(model._meta.db_table)

    def test_so_has_every_partition(self, db: None) -> None:
        names = partitions()
        # What was there before, all other times, and two or three months: it depends on the day.
        assert len(names) >= 4
        for name in names:
            self.check(name)

    @staticmethod
    def check(table: str) -> None:
        (switches,) = rows_of(
            "select relrowsecurity, relforcerowsecurity from pg_class where oid = %s::regclass",
            table,
        )
        assert switches == (True, True)
        policies = rows_of(
            "select cmd, roles::text, qual, with_check from pg_policies where tablename = %s", table
        )
        ours = {cmd: (qual, check) for cmd, roles, qual, check in policies if roles == "{public}"}
        assert set(ours) == {"SELECT", "INSERT", "UPDATE", "DELETE"}
        for conditions in ours.values():
            for condition in filter(None, conditions):
                assert "tenant_id = (NULLIF(current_setting('lorikeet.tenant'" in condition
        assert [roles for cmd, roles, *_ in policies if cmd == "ALL"] == [f"{{{OPERATOR_ROLE}}}"]

    @pytest.mark.parametrize("model", TENANT_MODELS, ids=lambda model: model.__name__)
    def test_references_between_tenant_tables_contain_the_tenant(
        self, db: None, model: Any
    ) -> None:
        for field in tenant_references(model):
            found = rows_of(
                "select pg_get_constraintdef(oid) from pg_constraint "
                "where conrelid = %s::regclass and conname = %s",
                model._meta.db_table,
                reference_name(model, field),
            )
            assert len(found) == 1, field
            assert found[0][0].startswith(f"FOREIGN KEY (tenant_id, {field.column})")

    def test_the_role_has_no_way_past_the_policies(self, db: None) -> None:
        (role,) = rows_of(
            "select rolsuper, rolbypassrls, rolcreaterole, rolinherit from pg_roles "
            "where rolname = current_user"
        )
        assert role == (False, False, False, False)
        assert rows_of("select tablename from pg_tables where tableowner = current_user") == []
        assert rows_of("select datname from pg_database where datdba = current_user::regrole") == []

    def test_the_check_finds_what_was_left_outside(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert checks.check_row_security(None) == []
        tables, references = checks._protected()
        tables = {**tables, ("adapters", "adapterversion"): set()}
        del tables["tenants", "membership"]
        monkeypatch.setattr(checks, "_protected", lambda: (tables, references))
        found = {(error.id, error.obj) for error in checks.check_row_security(None)}
        assert found == {("lorikeet.E001", Membership), ("lorikeet.E002", AdapterVersion)}


class TestDatabaseAlone:
    def test_only_the_scopes_rows_are_there(
        self, acme: Party, globex: Party, unscoped: None
    ) -> None:
        for party in (acme, globex):
            with tenant_scope(party.tenant.id):
                assert list(ApiKey.objects.all()) == [party.api_key]
                tenants = set(Membership.objects.values_list("tenant_id", flat=True))
                assert tenants == {party.tenant.id}
        with all_tenants(reason="test"):
            assert ApiKey.objects.count() == 2

    def test_without_a_scope_there_is_nothing(self, acme: Party, unscoped: None) -> None:
        for model in TENANT_MODELS:
            assert not model._base_manager.exists()
        assert ApiKey.objects.update(name="theirs") == 0
        assert ApiKey.objects.all().delete()[0] == 0
        with pytest.raises(ProgrammingError, match="row-level security"), transaction.atomic():
            ApiKey(tenant=acme.tenant, public_id="x", secret_hmac=b"", name="x").save()
        with tenant_scope(acme.tenant.id):
            assert ApiKey.objects.get().name == "tests"

    def test_another_tenants_rows_can_be_neither_made_nor_changed(
        self, acme: Party, globex: Party, unscoped: None
    ) -> None:
        with tenant_scope(acme.tenant.id):
            with pytest.raises(ProgrammingError, match="row-level security"), transaction.atomic():
                ApiKey(tenant=globex.tenant, public_id="x", secret_hmac=b"", name="x").save()
            with pytest.raises(ProgrammingError, match="row-level security"), transaction.atomic():
                ApiKey.objects.update(tenant=globex.tenant)
            assert ApiKey.objects.filter(pk=globex.api_key.pk).update(name="mine") == 0
            assert ApiKey.objects.filter(pk=globex.api_key.pk).delete()[0] == 0

    def test_a_row_cannot_point_at_another_tenants(
        self, acme: Party, globex: Party, base_model: BaseModel, unscoped: None
    ) -> None:
        with tenant_scope(globex.tenant.id):
            theirs = Adapter(tenant=globex.tenant, name="theirs", base_model=base_model)
            theirs.save()
        with tenant_scope(acme.tenant.id), pytest.raises(IntegrityError, match="tenant"):
            AdapterVersion(tenant=acme.tenant, adapter_id=theirs.pk, number=1).save()
            connection.check_constraints()

    def test_a_scope_inside_another_ends_with_its_block(
        self, acme: Party, globex: Party, unscoped: None
    ) -> None:
        with tenant_scope(acme.tenant.id):
            with all_tenants(reason="test"):
                assert ApiKey.objects.count() == 2
            with tenant_scope(globex.tenant.id), pytest.raises(RuntimeError), transaction.atomic():
                assert ApiKey.objects.get() == globex.api_key
                raise RuntimeError  # back to a savepoint, and with it all settings since
            assert ApiKey.objects.get() == acme.api_key
        assert not ApiKey.objects.exists()


def raw(text: str) -> Any:
    """Straight to PostgreSQL, without what the backend sends along."""
    return connection.connection.execute(text).fetchone()[0]


@pytest.mark.django_db(transaction=True)
def test_nothing_of_a_tenant_stays_on_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    party = make_party("acme")
    unscope(monkeypatch)

    def assert_clean() -> None:
        assert raw("select count(*) from tenants_apikey") == 0
        assert raw("select coalesce(current_setting('lorikeet.tenant', true), '')") == ""
        assert raw("select current_user = session_user")

    with tenant_scope(party.tenant.id):
        assert ApiKey.objects.count() == 1  # in autocommit
        assert_clean()
        with transaction.atomic():
            assert ApiKey.objects.count() == 1
            assert raw("select count(*) from tenants_apikey") == 1
        assert_clean()
        with pytest.raises(RuntimeError), transaction.atomic():
            ApiKey.objects.update(name="changed")
            raise RuntimeError
        assert_clean()
    with all_tenants(reason="test"), transaction.atomic():
        assert ApiKey.objects.get().name == "tests"
        assert raw("select current_user") == OPERATOR_ROLE
    assert_clean()


@pytest.mark.django_db(transaction=True)
def test_row_security_can_be_removed_and_restored() -> None:
    policies = "select count(*) from pg_policies where tablename = 'training_schedulerun'"
    references = """
        select count(*) from pg_constraint where conname ~ '^training_schedulerun_.*_tenant$'
    """
    before = rows_of(policies), rows_of(references)
    assert before[0] == [(5,)] and before[1] > [(0,)]
    state = MigrationLoader(None).project_state()
    operation = TenantTables("ScheduleRun")
    with as_owner(connection), connection.schema_editor() as editor:
        operation.database_backwards("training", editor, state, state)
        assert (rows_of(policies), rows_of(references)) == ([(0,)], [(0,)])
        operation.database_forwards("training", editor, state, state)
    assert (rows_of(policies), rows_of(references)) == before


async def look_around(request: HttpRequest) -> JsonResponse:
    """As a handler of the gateway, but one whose queries ask for everybody's rows."""
    principal = await callers.authenticate(request)
    seen: set[str] = set()

    def in_transaction() -> list[str]:
        try:
            with tenant_scope(principal.tenant.id), transaction.atomic():
                return [str(key.tenant_id) for key in ApiKey.objects.all()]
        finally:
            close_old_connections()

    def in_autocommit() -> list[str]:
        try:
            with tenant_scope(principal.tenant.id):
                return [str(key.tenant_id) for key in ApiKey.objects.all()]
        finally:
            close_old_connections()

    for query in (in_transaction, in_autocommit, in_transaction):
        found = await sync_to_async(query)()
        assert len(found) == 3
        seen.update(found)
        await asyncio.sleep(0)
    return JsonResponse({"seen": sorted(seen)})


urlpatterns = [path("look", look_around)]


@pytest.fixture
def pool_of_two(transactional_db: None) -> Iterator[None]:
    connection.close()
    options = connection.settings_dict["OPTIONS"]
    options["pool"] = {"min_size": 2, "max_size": 2, "timeout": 60}
    yield
    connection.close()
    connection.close_pool()  # type: ignore[attr-defined]
    del options["pool"]


async def test_200_requests_of_10_tenants_over_2_connections(
    pool_of_two: None, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ROOT_URLCONF = __name__
    # They wait for one another longer than gateways wait for a database, on a slow machine.
    for constant in ("DOUBT_S", "KEPT_WAIT_S", "WAIT_S"):
        monkeypatch.setattr(while_away, constant, 60.0)
    monkeypatch.setattr(circuit, "MAX_DOUBT_S", 60.0)

    def make() -> list[Party]:
        parties = [make_party(f"tenant-{number}") for number in range(10)]
        for party in parties:
            with tenant_scope(party.tenant.id):
                for name in ("one", "two"):
                    services.api_key_create(name=name)
        connections.close_all()
        return parties

    parties = await sync_to_async(make)()
    unscope(monkeypatch)

    async def ask(party: Party) -> None:
        async with ThreadSensitiveContext():  # a thread of its own, as the server gives it
            answer = await AsyncClient().get("/look", headers={"Authorization": party.header})
        assert answer.json() == {"seen": [str(party.tenant.id)]}

    await asyncio.gather(*(ask(parties[number % 10]) for number in range(200)))
    await sync_to_async(connections.close_all)()


class TestElsewhere:
    def test_keys_of_the_object_store_carry_the_tenant(self) -> None:
        tenant_id = uuid.uuid4()
        version = AdapterVersion(tenant_id=tenant_id, digest="d" * 64)
        keys = (
            version.config_key,
            version.tensors_key,
            version.staged_config_key,
            version.staged_tensors_key,
            dataset_key(tenant_id, "d" * 64),
        )
        assert all(key.startswith(f"t/{tenant_id}/") for key in keys)

    def test_log_lines_carry_the_tenant(self) -> None:
        def label() -> object:
            return add_tenant(None, "info", {}).get("tenant_id")

        tenant_id = uuid.uuid4()
        with tenant_scope(tenant_id):
            assert label() == str(tenant_id)
        with all_tenants(reason="test"):
            assert label() == "*"
        assert label() is None
