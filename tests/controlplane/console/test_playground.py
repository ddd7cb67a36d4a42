"""The playground's page. What streams is in test_playground_stream."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.adapters.models import AdapterVersion
from controlplane.aliases.contents import Contents
from controlplane.aliases.contents import Part as TargetPart
from controlplane.aliases.services import alias_create
from controlplane.requestlog.services import Words, contents_keep, log_policy_set
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Role
from controlplane.tenants.services import member_add
from controlplane.usage.services import usage_settle
from tests.controlplane.conftest import PASSWORD, Party
from tests.controlplane.console.conftest import Belongings, browser_of
from tests.controlplane.queue.test_accountant import record

PAGE = "/console/playground"


def start_of(page: str) -> dict[str, Any]:
    """What the page's script begins with."""
    found = re.search(r'<script id="playground-start" type="application/json">(.*?)</script>', page)
    assert found
    return dict(json.loads(found[1]))


def opened(browser: Client, query: str = "") -> str:
    answer = browser.get(PAGE + query)
    assert answer.status_code == 200
    return answer.content.decode()


@pytest.fixture
def held(acme: Party, belongings: Belongings) -> AdapterVersion:
    """A ready version 3 of invoices, of which version 1 is live."""
    with tenant_scope(acme.tenant.id):
        return AdapterVersion.objects.create(
            adapter=belongings.adapter,
            number=3,
            status=AdapterVersion.Status.READY,
            digest="d3" * 32,
        )


class TestPage:
    def test_begins_with_the_models_of_its_address(
        self, acme: Party, belongings: Belongings
    ) -> None:
        page = opened(browser_of(acme.owner), "?model=invoices&model=tiny&model=a&model=b&model=a")
        names = [[part["name"] for part in column] for column in start_of(page)["columns"]]
        assert names == [["invoices"], ["tiny"], ["a"]]
        assert '<option value="invoices">adapter, version 1 is live</option>' in page
        assert '<option value="invoices@1">' in page
        assert '<option value="invoices@2">' not in page  # it was rejected
        assert '<option value="tiny">base model</option>' in page

    def test_an_aliass_targets_side_by_side(self, acme: Party, held: AdapterVersion) -> None:
        contents = Contents(
            primary=(TargetPart(adapter="invoices"),),
            canary=(
                TargetPart(adapter="invoices", version=1, weight=0.25),
                TargetPart(adapter="invoices", version=3, weight=0.75),
            ),
            canary_percent=10,
            json_schema={"type": "object", "properties": {"</textarea>": {"type": "string"}}},
            system_prompt="Answer in German.",
            sampling={"temperature": 0.5, "min_p": 0.1, "stop": ["END"]},
        )
        with tenant_scope(acme.tenant.id):
            alias_create(name="prod", contents=contents)
        owner = browser_of(acme.owner)
        page = opened(owner, "?alias=prod")
        start = start_of(page)
        assert [[(part["name"], part["weight"]) for part in each] for each in start["columns"]] == [
            [("invoices", 1.0)],
            [("invoices@1", 0.25), ("invoices@3", 0.75)],
        ]
        assert start["parameters"] == {"temperature": 0.5, "stop": "END"}
        assert "The page has no field for its min_p." in page
        assert ">Answer in German.</textarea>" in page
        assert "&lt;/textarea&gt;&quot;: {" in page
        kind = "alias of invoices; 10 %: 0.25*invoices@1 + 0.75*invoices@3"
        assert f'<option value="prod">{kind}</option>' in page
        assert f"{PAGE}?alias=prod" in owner.get("/console/aliases/prod").content.decode()
        viewer = browser_of(acme.viewer).get("/console/aliases/prod").content.decode()
        assert PAGE not in viewer
        with tenant_scope(acme.tenant.id):
            alias_create(name="invoices", contents=replace(contents, canary=(), canary_percent=0))
        page = opened(owner)
        assert page.count('<option value="invoices">') == 1
        assert '<option value="invoices">alias of invoices</option>' in page
        shown = owner.get("/console/aliases/invoices").content.decode()
        assert f"{PAGE}?model=invoices" in shown

    def test_no_alias_of_another_tenant(self, acme: Party, globex: Party, held: Any) -> None:
        with tenant_scope(acme.tenant.id):
            target = (TargetPart(adapter="invoices"),)
            alias_create(name="prod", contents=Contents(primary=target))
        stranger = browser_of(globex.owner)
        for name in ("prod", "none", "%00", "a/b"):
            assert stranger.get(f"{PAGE}?alias={name}").status_code == 404, name
        assert 'value="prod"' not in opened(stranger)

    def test_no_name_breaks_out_of_the_page(self, acme: Party) -> None:
        page = opened(browser_of(acme.owner), "?model=</script><script>alert(1)</script>&model=%00")
        assert "<script>alert(1)" not in page
        assert len(start_of(page)["columns"]) == 1

    def test_has_no_inline_script(self, acme: Party) -> None:
        page = opened(browser_of(acme.owner))
        assert re.findall(r"<script(?![^>]* (?:src=|type=\"application/json\"))[^>]*>", page) == []
        assert not re.search(r" (?:style|on\w+)=", page)

    def test_a_held_version_can_be_made_live_there(self, acme: Party, held: AdapterVersion) -> None:
        browser = browser_of(acme.owner)
        address = "/console/adapters/invoices/versions/3/promote"
        compare = "?model=invoices&amp;model=invoices@3"
        assert compare in browser.get("/console/adapters/invoices/versions/3").content.decode()
        assert f'action="{address}"' in opened(browser, compare.replace("&amp;", "&"))
        for query in ("?model=invoices", "?model=invoices@1", "?model=invoices@2", "?model=no@1"):
            assert "/promote" not in opened(browser, query), query
        browser.post(address)
        assert "/promote" not in opened(browser, "?model=invoices@3")

    def test_nothing_leads_a_viewer_there(self, acme: Party, held: AdapterVersion) -> None:
        usage_settle([record(acme, "req_1", created_at=timezone.now().timestamp() - 1)])
        viewer, owner = browser_of(acme.viewer), browser_of(acme.owner)
        for path in ("/", "/adapters/invoices", "/adapters/invoices/versions/3", "/requests/req_1"):
            assert PAGE in owner.get(f"/console{path}").content.decode(), path
            assert PAGE not in viewer.get(f"/console{path}").content.decode(), path

    def test_a_run_leads_to_its_version(self, acme: Party, belongings: Belongings) -> None:
        with tenant_scope(acme.tenant.id):
            belongings.run.version = belongings.ready
            belongings.run.save()
        page = browser_of(acme.owner).get(f"/console/training/runs/{belongings.run.pk}")
        assert f'href="{PAGE}?model=invoices"' in page.content.decode()

    def test_of_another_tenant_nothing_is_known(
        self, acme: Party, globex: Party, held: AdapterVersion
    ) -> None:
        usage_settle([record(acme, "req_1", created_at=timezone.now().timestamp() - 1)])
        stranger = browser_of(globex.owner)
        page = opened(stranger, "?model=invoices&model=invoices@3")
        assert "/promote" not in page
        assert '<option value="invoices' not in page
        assert stranger.get(f"{PAGE}?request=req_1").status_code == 404


def logged(party: Party, *messages: dict[str, Any], **prompt: Any) -> None:
    """A request of the log, req_1, with its words."""
    sampling = {"temperature": 0.25, "max_tokens": 40, "seed": 7, "top_p": 1.0, "min_p": 0.1}
    fields = {"model": "invoices@1", "sampling": sampling, "adapter_version_id": None}
    moment = timezone.now().timestamp() - 1
    usage_settle([record(party, "req_1", created_at=moment, **fields)])
    with tenant_scope(party.tenant.id):
        log_policy_set(content="all", content_days=30, metadata_days=90)
    words = Words(
        tenant_id=party.tenant.id,
        request_id="req_1",
        store=None,
        finish_reason="stop",
        is_truncated=False,
        prompt={"messages": list(messages)} if messages else prompt,
        outputs=["fine"],
    )
    assert contents_keep([words]) == 1


class TestAgain:
    def test_takes_the_model_the_prompt_and_the_parameters(self, acme: Party) -> None:
        logged(acme, {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"})
        page = opened(browser_of(acme.owner), "?request=req_1")
        start = start_of(page)
        assert start["columns"] == [[{"name": "invoices@1", "weight": 1.0}]]
        assert (start["system"], start["user"]) == ("Be brief.", "Hi?")
        assert start["parameters"] == {
            "temperature": 0.25, "max_tokens": 40, "seed": 7, "top_p": 1.0,
        }  # fmt: skip
        assert start["note"] == ""
        assert ">Be brief.</textarea>" in page

    @pytest.mark.parametrize(
        ("prompt", "user", "note"),
        [
            ({"text": "Once"}, "Once", "plain text"),
            ({"token_ids": [1, 2]}, "", "token ids"),
            ({"messages": [{"role": "user", "content": c} for c in "ab"]}, "b", "2 messages"),
        ],
    )
    def test_says_what_it_could_not_take(
        self, prompt: dict[str, Any], user: str, note: str, acme: Party
    ) -> None:
        logged(acme, **prompt)
        start = start_of(opened(browser_of(acme.owner), "?request=req_1"))
        assert start["user"] == user
        assert note in start["note"]

    def test_words_are_for_those_who_may_read_them(self, acme: Party) -> None:
        logged(acme, {"role": "user", "content": "between us"})
        with tenant_scope(acme.tenant.id):
            person = member_add(email="dev@acme.example", role=Role.DEVELOPER, password=PASSWORD)
        page = opened(browser_of(person.user), "?request=req_1")
        assert "between us" not in page
        assert start_of(page)["columns"] == [[{"name": "invoices@1", "weight": 1.0}]]
        assert "your role may not read it" in start_of(page)["note"]
