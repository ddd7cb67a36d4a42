"""Lists of thousands of tenants: few queries, each of which reads few rows, and none too long."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.db import OperationalError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.operator import site
from controlplane.operator.admin.lists import MAX_PAGES
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.tenancy.scope import statement_timeout_ms
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants.models import Tenant
from tests.controlplane.conftest import make_operator
from tests.controlplane.operator.seed import owners_connection, seed

#: Of which an operator's page must not read more than a part.
BIG = (
    "adapters_adapter",
    "adapters_adapterversion",
    "inference_inferencerequest",
    "usage_usagerecord",
    "tenants_apikey",
    "tenants_membership",
    "tenants_user",
    "training_dataset",
    "training_trainingrun",
)
#: List -> queries to try; {tenant} is a tenant's id.
LISTS = {
    "tenants_tenant": ("", "p=3", "q=tenant-001", "o=-2"),
    "tenants_user": ("", "p=2", "q=person-001"),
    "tenants_membership": ("", "q=person-0001", "q=tenant-0001", "tenant__id__exact={tenant}"),
    "tenants_apikey": ("", "q=key_19", "q=tenant-00001", "q=tenant-00001/key", "o=2"),
    "adapters_adapter": ("", "p=2", "q=tenant-00001/ad", "tenant__id__exact={tenant}", "o=1"),
    "adapters_adapterversion": (
        *("", "p=3", "q=tenant-00001", "q=tenant-00001/ad"),
        *("q=c4ca4238a0b923820dcc509a6f75849b", "tenant__id__exact={tenant}", "o=2"),
    ),
    "training_dataset": ("", "q=tenant-00001/data", "tenant__id__exact={tenant}"),
    "training_trainingrun": ("", "q=tenant-00001", "tenant__id__exact={tenant}"),
    "inference_inferencerequest": (
        *("", "p=4", "q=req_c4ca4238a0b9", "q=tenant-00001", "since=hour", "since=week"),
        *("tenant__id__exact={tenant}", "tenant__id__exact={tenant}&finish_reason=error", "o=2"),
    ),
    "usage_usagerecord": ("", "p=4", "q=req_c4ca4238a0b9", "tenant__id__exact={tenant}"),
}
MAX_QUERIES, MAX_ROWS = 10, 1000


def operator() -> Client:
    client = Client()
    client.force_login(make_operator())
    return client


def pages() -> Iterator[tuple[str, str]]:
    with all_tenants(reason="test"):
        tenant = Tenant.objects.get(slug="tenant-00001")
    for name, queries in LISTS.items():
        for query in queries:
            url = reverse(f"admin:{name}_changelist")
            yield name, f"{url}?{query.format(tenant=tenant.pk)}"


def rows_read(sql: str, *, is_small: bool) -> dict[str, int]:
    """How many rows a statement reads of each table, those that it throws away included.

    is_small  whether the tables are so small that the planner may rightly read one as a whole: then
              it has to show that it could do without
    """
    read: dict[str, int] = {}

    def visit(node: dict[str, Any]) -> None:
        table = node.get("Relation Name")
        if table:
            if table.startswith("usage_usagerecord_"):  # a month
                table = "usage_usagerecord"
            seen = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            read[table] = read.get(table, 0) + seen * node["Actual Loops"]
        for inner in node.get("Plans", ()):
            visit(inner)

    with all_tenants(reason="test"), transaction.atomic(), connection.cursor() as cursor:
        if is_small:
            cursor.execute("set local enable_seqscan = off")
            cursor.execute("set local enable_hashjoin = off")
        cursor.execute(f"explain (analyze, format json) {sql}")
        (plan,) = cursor.fetchone()
    visit((plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"])
    return read


def check(client: Client, url: str, *, is_small: bool) -> None:
    """The page opens, with few queries, of which none counts or reads many rows."""
    with CaptureQueriesContext(connection) as caught:
        answer = client.get(url)
    assert answer.status_code == 200, url
    assert len(caught) <= MAX_QUERIES, (url, [query["sql"] for query in caught])
    for query in caught:
        sql = query["sql"].rpartition("true); ")[2] or query["sql"]
        if not sql.startswith("SELECT") or not any(f'FROM "{table}"' in sql for table in BIG):
            continue
        assert "COUNT(" not in sql, (url, sql)
        for table, number in rows_read(sql, is_small=is_small).items():
            assert table not in BIG or number <= MAX_ROWS, (url, table, number, sql)


@pytest.mark.django_db(transaction=True)
def test_a_page_reads_few_rows_with_few_queries() -> None:
    seed(tenants=500, adapters=5000, requests=20_000)
    client = operator()
    for _, url in pages():
        check(client, url, is_small=True)


@pytest.mark.django_db
def test_usage_is_searched_without_an_index_of_prefixes() -> None:
    """The tests' database sorts by bytes, where any index finds prefixes; others do not."""
    client = operator()
    with CaptureQueriesContext(connection) as caught:
        answer = client.get(reverse("admin:usage_usagerecord_changelist"), {"q": "req_c4ca"})
    assert answer.status_code == 200
    (sql,) = (query["sql"] for query in caught if 'FROM "usage_usagerecord"' in query["sql"])
    assert "LIKE" not in sql.partition("WHERE")[2]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.django_db(transaction=True)
def test_lists_hold_at_five_thousand_tenants(capsys: pytest.CaptureFixture[str]) -> None:
    seed(tenants=5000, adapters=50_000, requests=200_000)
    client = operator()
    took = {}
    for name, url in pages():
        check(client, url, is_small=False)
        begin = time.perf_counter()
        client.get(url)
        took[f"{name} {url.partition('?')[2]}"] = time.perf_counter() - begin
    with capsys.disabled():
        lines = [f"{seconds * 1000:7.0f} ms  {what}" for what, seconds in took.items()]
        sys.stdout.write("\n".join(["", *lines, ""]))
    assert max(took.values()) < 3


@pytest.fixture
def client(db: None) -> Client:
    return operator()


def some_requests(number: int) -> None:
    tenant = Tenant.objects.create(slug="acme", name="Acme")
    with all_tenants(reason="test"):
        InferenceRequest.objects.bulk_create(
            InferenceRequest(
                tenant=tenant,
                request_id=f"req_{index:04}",
                model="m",
                base_model="tiny",
                worker_id="w",
                finish_reason="stop",
                accepted_at=tenant.created_at,
            )
            for index in range(number)
        )


def test_pages_without_a_count_show_every_row_once(client: Client) -> None:
    some_requests(103)
    url, seen, steps = reverse("admin:inference_inferencerequest_changelist"), [], 0
    query = "?"
    while query:
        page = client.get(url + query).content.decode()
        with all_tenants(reason="test"):
            keys = re.findall(r"inferencerequest/([0-9a-f-]{36})/change", page)
        seen += list(dict.fromkeys(keys))
        found = re.search(r'href="(\?[^"]*p=\d+)">Next<', page)
        query, steps = found[1].replace("&amp;", "&") if found else "", steps + 1
    assert (len(seen), len(set(seen)), steps) == (103, 103, 3)
    assert "Rows 101 to 103" in page


def test_a_page_that_does_not_exist_leads_to_the_first(client: Client) -> None:
    url = reverse("admin:inference_inferencerequest_changelist")
    assert client.get(f"{url}?p={MAX_PAGES + 1}").headers["Location"] == f"{url}?e=1"
    assert client.get(f"{url}?p=7").status_code == 200  # empty: nobody counts


def test_every_list_is_bounded() -> None:
    for model, page in admin.site._registry.items():
        assert page.show_full_result_count is False, model
        assert page.date_hierarchy is None, model
        assert "tenant" not in page.list_filter, model
        assert "Ahead" in page.get_changelist(None).__name__, model


def test_a_tenant_is_chosen_by_search(client: Client) -> None:
    some_requests(1)
    filters = client.get(reverse("admin:inference_inferencerequest_changelist")).content.decode()
    assert "acme" not in filters.partition("changelist-filter")[2]
    asked = {"app_label": "inference", "model_name": "inferencerequest", "field_name": "tenant"}
    found = client.get(reverse("admin:autocomplete"), {**asked, "term": "ac"}).json()
    assert [row["text"] for row in found["results"]] == ["acme"]
    assert found["pagination"] == {"more": False}


@pytest.mark.django_db(transaction=True)
def test_a_statement_that_takes_too_long_is_cancelled_and_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(site, "STATEMENT_TIMEOUT_MS", 300)
    signed_in = operator()
    with owners_connection() as other, other.transaction():
        other.execute("lock table inference_inferencerequest in access exclusive mode")
        answer = signed_in.get(reverse("admin:inference_inferencerequest_changelist"), {"q": "x"})
    assert answer.status_code == 503
    assert b"Narrow the search" in answer.content
    assert statement_timeout_ms.get() == 0
    with connection.cursor() as cursor:  # only the page's statements have it
        cursor.execute("show statement_timeout")
        assert cursor.fetchone() == ("0",)


@pytest.mark.django_db
def test_another_error_of_the_database_is_no_slow_page() -> None:
    with connection.execute_wrapper(_fail):
        answer = operator().get(reverse("admin:inference_inferencerequest_changelist"))
    assert answer.status_code == 503
    assert "narrow the search" not in answer.content.decode().lower()


def _fail(execute: Any, sql: str, *rest: Any) -> Any:
    if "inference_inferencerequest" in sql:
        raise OperationalError("the connection is lost")
    return execute(sql, *rest)
