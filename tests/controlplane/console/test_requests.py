"""The pages of the request log."""

from __future__ import annotations

import dataclasses
import datetime as dt
import html
import re
import uuid
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.console import request_log
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import LogPolicy, RefusalHour
from controlplane.requestlog.refusals import RefusalKey, refusals_add
from controlplane.requestlog.services import Words, contents_keep, log_policy_set
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import ApiKey, Role, User
from controlplane.tenants.services import api_key_create, member_add
from controlplane.usage.services import usage_settle
from tests.controlplane.conftest import PASSWORD, Party
from tests.controlplane.console.conftest import Belongings, browser_of
from tests.controlplane.queue.test_accountant import record

PAGE = "/console/requests"
MARKUP = "<img src=x onerror=alert(1)>"


def settle(party: Party, *names: str, **fields: Any) -> None:
    """Requests that have just ended."""
    fields = {"created_at": timezone.now().timestamp() - 1, "adapter_version_id": None} | fields
    usage_settle([record(party, name, **fields) for name in names])


def listed(browser: Client, query: str = "", page: str = PAGE) -> list[str]:
    answer = browser.get(f"{page}{query}")
    assert answer.status_code == 200
    return re.findall(r'href="/console/requests/([^"]+)"><time', answer.content.decode())


def link(browser: Client, query: str, name: str) -> str | None:
    body = browser.get(f"{PAGE}{query}").content.decode()
    found = re.search(rf'href="(\?[^"]*)">{name}<', body)
    return html.unescape(found[1]) if found else None


class TestList:
    def test_says_of_each_what_came_of_it(self, acme: Party, belongings: Belongings) -> None:
        settle(acme, "req_ok", adapter_version_id=str(belongings.ready.pk))
        settle(acme, "req_cut", finish_reason="length")
        settle(acme, "req_left", finish_reason="cancelled", first_token_ms=None)
        settle(acme, "req_bad", finish_reason="error", error_code="context_length_exceeded")
        body = browser_of(acme.viewer).get(PAGE).content.decode()
        assert re.findall(r'<span class="badge (\w*)">(\w+)</span>', body) == [
            *(("bad", "failed"), ("warn", "cancelled"), ("warn", "cut"), ("good", "ok")),
        ]
        assert "context_<wbr>length_<wbr>exceeded" in body
        assert "invoices@1" in body
        assert f'tests</span><small class="sub mono">…{acme.api_key.last4}' in body
        label = "500 ms in total: queue 1 ms, load 2 ms, prefill 0 ms, decode 497 ms"
        assert body.count(f'aria-label="{label}"') == 3

    def test_blend_names_all_of_its_parts(self, acme: Party, belongings: Belongings) -> None:
        settle(acme, "req_1", model="a+b", digests=(belongings.ready.digest, "gone"))
        browser = browser_of(acme.viewer)
        assert b"invoices@1" in browser.get(PAGE).content
        body = browser.get(f"{PAGE}/req_1").content.decode()
        assert 'href="/console/adapters/invoices/versions/1"' in body
        assert belongings.ready.digest in body
        assert ">gone<" in body

    def test_details_say_each_parts_weight(self, acme: Party, belongings: Belongings) -> None:
        sampling = {"seed": 7, "top_p": 0.9, "temperature": 0.5}
        digests = (belongings.ready.digest, "gone")
        settle(acme, "req_1", digests=digests, weights=(0.7, -0.25), sampling=sampling, attempts=2)
        settle(acme, "req_2", digests=digests[:1], weights=(1.0,), finish_reason="length")
        browser = browser_of(acme.viewer)
        body = browser.get(f"{PAGE}/req_1").content.decode()
        text = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", body))
        assert f"0.7 × invoices@1{digests[0]}-0.25 × a deleted version" in text
        assert "temperature 0.5, top_p 0.9, seed 7" in text
        assert "attempt 2" in text
        alone = browser.get(f"{PAGE}/req_2").content.decode()
        assert "×" not in alone
        assert "length" in alone
        assert "the context was full" in alone

    def test_the_overview_says_the_same(self, acme: Party) -> None:
        settle(acme, "req_cut", finish_reason="length")
        body = browser_of(acme.viewer).get("/console/").content.decode()
        assert '<span class="badge warn">cut</span>' in body
        assert 'href="/console/requests/req_cut"' in body

    def test_failed_hides_no_failure(self, acme: Party) -> None:
        """Neither one that ended as nobody here knows, nor those refused at admission."""
        settle(acme, "req_ok")
        settle(acme, "req_cut", finish_reason="length", error_code="internal")
        settle(acme, "req_odd", finish_reason="something new")
        browser = browser_of(acme.viewer)
        assert listed(browser, "?state=failed") == ["req_odd", "req_cut"]
        overview = re.sub(r"<[^>]*>", "", browser.get("/console/").content.decode())
        assert re.search(r"Failed\s*2\s*(?!and)", overview)
        hour = timezone.now().replace(minute=0, second=0, microsecond=0)
        with tenant_scope(acme.tenant.id):
            RefusalHour.objects.create(
                starts_at=hour, endpoint="/v1", status=503, code="no_worker", requests=12
            )
        body = browser.get(f"{PAGE}?state=failed").content.decode()
        assert body.index('id="refusals"') < body.index('id="requests"')
        assert body.count('id="refusals"') == 1
        overview = re.sub(r"<[^>]*>", "", browser.get("/console/").content.decode())
        assert re.search(r"Failed\s*2\s*and 12 refused at admission", overview)

    def test_filters(self, acme: Party) -> None:
        now = timezone.now().timestamp()
        settle(acme, "req_1", model="invoices@2", created_at=now - 30 * 3600)
        settle(acme, "req_2", model="invoices-old", finish_reason="error", error_code="internal")
        settle(acme, "req_3", model="invoices", first_token_ms=2000.0, total_ms=2500.0)
        settle(acme, "req_4", model="all", first_token_ms=None, total_ms=9000.0)
        browser = browser_of(acme.viewer)
        for query, found in [
            ("", ["req_4", "req_3", "req_2", "req_1"]),
            ("?model=invoices", ["req_3", "req_1"]),
            ("?model=invoices%402", ["req_1"]),
            ("?model=all", ["req_4"]),
            ("?model=%00", []),
            ("?model=%25", []),
            ("?state=failed", ["req_2"]),
            ("?state=slow", ["req_4", "req_3"]),
            ("?span=day", ["req_4", "req_3", "req_2"]),
            ("?span=week&model=invoices", ["req_3", "req_1"]),
            ("?span=eternity&state=odd&before=x&after=%00", ["req_4", "req_3", "req_2", "req_1"]),
        ]:
            assert listed(browser, query) == found, query

    def test_choices_stay_in_the_address(self, acme: Party) -> None:
        settle(acme, "req_1", model="a&b")
        body = browser_of(acme.viewer).get(f"{PAGE}?model=a%26b&state=slow&span=week").content
        found = {html.unescape(q) for q in re.findall(r'href="\?([^"]*)"', body.decode())}
        assert "model=a%26b&span=week" in found  # all states
        assert "model=a%26b&state=failed&span=week" in found
        assert "model=a%26b&state=slow&span=day" in found
        assert b'name="state" value="slow"' in body
        assert b'<option value="a&amp;b">' in body

    def test_pages_there_and_back(self, acme: Party, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request_log, "PAGE", 2)
        names = [f"req_{number}" for number in range(5)]
        settle(acme, *names)
        settle(acme, "req_other", model="other")
        with tenant_scope(acme.tenant.id):
            rows = InferenceRequest.objects.filter(model="invoices").order_by("-pk")
            order = [row.request_id for row in rows]
        browser, query, seen, queries = browser_of(acme.viewer), "?model=invoices", [], []
        while query:
            queries.append(query)
            seen.append(listed(browser, query))
            query = link(browser, query, "Older") or ""
        assert seen == [order[:2], order[2:4], order[4:]]
        assert link(browser, queries[0], "Newer") is None
        assert link(browser, queries[1], "Newest") == "?model=invoices"
        back = link(browser, queries[2], "Newer") or ""
        assert listed(browser, back) == order[2:4]
        settle(acme, "req_new")  # moves nothing
        assert [listed(browser, each) for each in queries[1:]] == seen[1:]
        newer = link(browser, queries[1], "Newer") or ""
        assert listed(browser, newer) == order[:2]
        # Less than a page is newer: that is the newest page, whole.
        newest = link(browser, newer, "Newer") or ""
        assert listed(browser, newest) == ["req_new", order[0]]
        assert link(browser, newest, "Newer") is None

    def test_behind_the_last_there_is_a_way_back(self, acme: Party) -> None:
        settle(acme, "req_1")
        body = browser_of(acme.viewer).get(f"{PAGE}?before={uuid.UUID(int=1)}").content
        assert b"There are no older requests" in body

    def test_a_new_tenant_is_told_what_comes(self, acme: Party) -> None:
        browser = browser_of(acme.viewer)
        assert b"No request yet" in browser.get(PAGE).content
        assert b"No accepted request failed" in browser.get(f"{PAGE}?state=failed").content

    def test_one_very_slow_request_is_cut_off(self, acme: Party) -> None:
        settle(acme, *(f"req_{number}" for number in range(12)), total_ms=100.0)
        settle(acme, "req_slow", total_ms=60_000.0)
        body = browser_of(acme.viewer).get(PAGE).content.decode()
        assert "A full bar is 150 ms" in body
        assert body.count('class="tear"') == 1
        assert "1 min in total" in body

    @pytest.mark.parametrize("num", [1, 40])
    def test_queries_do_not_grow_with_the_lines(
        self, num: int, acme: Party, belongings: Belongings, django_assert_num_queries: Any
    ) -> None:
        with tenant_scope(acme.tenant.id):
            keys = [api_key_create(name=f"key {number}")[0] for number in range(num)]
        for number, key in enumerate(keys):
            settle(
                acme,
                f"req_{number}",
                api_key_id=str(key.pk),
                digests=(belongings.ready.digest, f"d{number}"),
            )
        with tenant_scope(acme.tenant.id), django_assert_num_queries(3):
            page = request_log.log_page(request_log.Wanted.read({}), now=timezone.now(), after=None)
            versions = [line.parts[0].version for line in page.lines]
            assert [each and each.adapter.name for each in versions] == ["invoices"] * num
        browser = browser_of(acme.viewer)
        browser.get(PAGE)
        with CaptureQueriesContext(connection) as captured:
            browser.get(PAGE)
        # The person, its tenant and its others; then what the page says.
        tables = [re.search(r'FROM "(\w+)"', query["sql"]) for query in captured]
        read = [table[1] for table in tables if table and not table[1].startswith("tenants_")]
        assert sorted(read) == [
            "adapters_adapterversion",
            "django_session",
            "inference_inferencerequest",
            "requestlog_logpolicy",
            "requestlog_refusalhour",
            "usage_usageday",
        ]


class TestNewest:
    def test_only_the_first_page_asks_for_itself(
        self, acme: Party, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(request_log, "PAGE", 1)
        settle(acme, "req_1")
        settle(acme, "req_2")
        browser = browser_of(acme.viewer)
        assert b"data-live" in browser.get(PAGE).content
        older = link(browser, "", "Older") or ""
        assert listed(browser, older) == ["req_1"]
        assert b"data-live" not in browser.get(f"{PAGE}{older}").content

    def test_answers_when_there_is_something_new(self, acme: Party) -> None:
        browser = browser_of(acme.viewer)

        def poll() -> str:
            body = browser.get(f"{PAGE}?model=invoices").content.decode()
            found = re.search(r'hx-get="([^"]+)"', body)
            assert found is not None
            return html.unescape(found[1])

        first = poll()
        assert browser.get(first).status_code == 204
        settle(acme, "req_1")
        settle(acme, "req_other", model="other")
        assert listed(browser, "", first) == ["req_1"]
        assert b"<html" not in browser.get(first).content
        assert browser.get(poll()).status_code == 204


class TestOne:
    def test_has_all_that_is_known(self, acme: Party, belongings: Belongings) -> None:
        settle(
            acme,
            "req_1",
            endpoint="/v1/completions",
            stream=True,
            is_batch=True,
            adapter_version_id=str(belongings.ready.pk),
            digests=(belongings.ready.digest,),
            queue_ms=20.25,
            load_ms=100.0,
            first_token_ms=1437.0,
            total_ms=2437.0,
            tier="store",
            completion_tokens=11,
        )
        body = browser_of(acme.viewer).get(f"{PAGE}/req_1").content.decode()
        for text in (
            *("20.2 ms", "100 ms", "1,317 ms", "1,000 ms", "2,437 ms in all", "10 a second"),
            *("/v1/completions", ", streamed", ", by a batch", "w1", "4 cached"),
            *("invoices@1", belongings.ready.digest, "revision 000000000000"),
            "11 tokens read, 4 of them cached, 11 written",
            "Load: loading the adapter, which was in the object store.",
        ):
            assert text in body, text

    def test_says_how_it_failed(self, acme: Party) -> None:
        settle(
            acme,
            "req_1",
            finish_reason="error",
            error_code="adapter_unavailable",
            first_token_ms=None,
            api_key_id=str(uuid.uuid4()),
        )
        body = browser_of(acme.viewer).get(f"{PAGE}/req_1").content.decode()
        assert "<code>adapter_unavailable</code>, status 503" in body
        assert "(there was none)" in body
        assert "a deleted key" in body
        assert "a deleted version" in body

    def test_of_another_tenant_is_a_missing_one(self, acme: Party, globex: Party) -> None:
        settle(acme, "req_1")
        stranger = browser_of(globex.owner)
        answers = [stranger.get(f"{PAGE}/{name}") for name in ("req_1", "req_no", "%00")]
        assert {answer.status_code for answer in answers} == {404}
        bodies = {re.sub(rb"[A-Za-z0-9]{64}", b"", answer.content) for answer in answers}
        assert len(bodies) == 1
        assert listed(stranger) == []

    def test_names_with_markup_are_text(self, acme: Party) -> None:
        settle(acme, "req_1", model=MARKUP, error_code=MARKUP, worker_id=MARKUP, endpoint=MARKUP)
        with tenant_scope(acme.tenant.id):
            ApiKey.objects.update(name=MARKUP)
        browser = browser_of(acme.viewer)
        for page in (PAGE, f"{PAGE}?model={MARKUP}", f"{PAGE}/req_1"):
            body = browser.get(page).content.decode()
            assert "<img src=x" not in body
            assert html.escape(MARKUP) in body

    @pytest.mark.parametrize(
        ("times", "ends"),
        [
            ((10, 20, 50, 100), [10, 30, 50, 100]),
            ((10, 20, None, 100), [10, 30, 100, 100]),  # no token came
            ((100, 0, None, 100), [100, 100, 100, 100]),  # nor did a worker
            ((10, 20, 15, 100), [10, 30, 30, 100]),  # a clock that was set
            ((200, 20, 300, 100), [100, 100, 100, 100]),
            ((0, 0, None, 0), [0, 0, 0, 0]),
        ],
    )
    def test_phases_have_no_gap(self, times: tuple[Any, ...], ends: list[int]) -> None:
        queue_ms, load_ms, first_token_ms, total_ms = times
        row = InferenceRequest(
            queue_ms=queue_ms, load_ms=load_ms, first_token_ms=first_token_ms, total_ms=total_ms
        )
        found = request_log.phases(row)
        assert [phase.end_ms for phase in found] == ends
        assert [phase.begin_ms for phase in found] == [0, *ends[:-1]]
        assert all(phase.took_ms >= 0 for phase in found)


@pytest.fixture
def kept(acme: Party) -> Words:
    """What was said in acme's req_1."""
    with tenant_scope(acme.tenant.id):
        log_policy_set(content="all", content_days=7, metadata_days=90)
    settle(acme, "req_1")
    words = Words(
        tenant_id=acme.tenant.id,
        request_id="req_1",
        store=None,
        prompt={"messages": [{"role": "user", "content": f"Say {MARKUP}"}]},
        outputs=[f"I said {MARKUP}"],
        finish_reason="stop",
        is_truncated=False,
    )
    contents_keep([words])
    return words


class TestWords:
    def body(self, user: User) -> str:
        answer = browser_of(user).get(f"{PAGE}/req_1")
        assert answer.status_code == 200
        return answer.content.decode()

    @pytest.mark.parametrize("role", Role)
    def test_are_for_those_who_may_read_them(self, role: Role, acme: Party, kept: Words) -> None:
        with tenant_scope(acme.tenant.id):
            email = f"{role}@acme.test"
            user = member_add(email=email, role=role, password=PASSWORD).user
        if role == Role.BILLING:
            assert browser_of(user).get(f"{PAGE}/req_1").status_code == 403
            return
        body = self.body(user)
        may = role in (Role.OWNER, Role.ADMIN)
        assert (f"I said {html.escape(MARKUP)}" in body) == may
        assert (f"Say {html.escape(MARKUP)}" in body) == may
        assert ("Only owners and admins can read" in body) == (not may)
        assert "<img src=x" not in body

    def test_that_are_not_kept_are_said_not_to_be(self, acme: Party, kept: Words) -> None:
        settle(acme, "req_2")
        body = browser_of(acme.owner).get(f"{PAGE}/req_2").content.decode()
        assert "The prompt and answers of this request are not stored" in body
        with tenant_scope(acme.tenant.id):
            LogPolicy.objects.update(content="off")
        body = self.body(acme.owner)
        assert "are not stored. An owner can change that" in body
        assert 'href="/console/settings#request-log"' in body
        assert "I said" not in body

    @pytest.mark.parametrize(
        ("prompt", "passages"),
        [
            ({"text": "Once"}, [("prompt", "Once")]),
            ({"token_ids": [1, 2]}, [("prompt, as token ids", "1 2")]),
            ({"prompts": ["a", [3, 4]]}, [("prompt 1", "a"), ("prompt 2", "3 4")]),
            (
                {
                    "messages": [
                        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
                        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]},
                        {"role": "tool", "content": "42", "tool_call_id": "c1"},
                    ]
                },
                [
                    ("system", "Be kind."),
                    ("assistant", '{\n  "tool_calls": [\n    {\n      "id": "c1"\n    }\n  ]\n}'),
                    ("tool", '42\n{\n  "tool_call_id": "c1"\n}'),
                ],
            ),
        ],
    )
    def test_of_each_form_can_be_read(
        self, prompt: dict[str, Any], passages: list[tuple[str, str]], acme: Party, kept: Words
    ) -> None:
        settle(acme, "req_2")
        outputs = ["one", "two"]
        contents_keep(
            [dataclasses.replace(kept, request_id="req_2", prompt=prompt, outputs=outputs)]
        )
        body = browser_of(acme.owner).get(f"{PAGE}/req_2").content.decode()
        found = re.findall(r"<h3>([^<]*)</h3><pre[^>]*>([^<]*)</pre>", body)
        said = [(who, html.unescape(text)) for who, text in found]
        assert said == [*passages, ("answer 1", "one"), ("answer 2", "two")]


class TestRefusals:
    def test_by_reason_and_hour(self, acme: Party, globex: Party) -> None:
        hour = timezone.now().replace(minute=0, second=0, microsecond=0)
        limited = RefusalKey(acme.tenant.id, hour, "/v1/completions", 429, "rate_limit_exceeded")
        earlier = limited._replace(hour=hour - dt.timedelta(hours=2))
        refusals_add(
            {
                limited: 2,
                earlier: 3,
                earlier._replace(endpoint="/generate"): 4,
                limited._replace(status=400, code=MARKUP): 1,
                limited._replace(hour=hour - dt.timedelta(hours=24)): 100,
                limited._replace(tenant_id=globex.tenant.id): 1000,
            }
        )
        with tenant_scope(acme.tenant.id):
            found = request_log.refusals_of_last_day(timezone.now())
        assert [(reason.code, reason.status, reason.requests) for reason in found] == [
            *(("rate_limit_exceeded", 429, 9), (MARKUP, 400, 1)),
        ]
        assert found[0].hours == f"7 at {earlier.hour:%H:%M}, 2 at {hour:%H:%M}"
        heights = [bar.height for bar in found[0].chart.bars]
        assert (len(heights), heights[-3], heights[-1]) == (
            24,
            24.0,
            pytest.approx(24 * 2 / 7, 0.01),
        )
        body = browser_of(acme.viewer).get(PAGE).content.decode()
        assert found[0].hours in body
        assert '<a href="#refusals">10 more</a> were refused' in body
        assert "<img src=x" not in body

    def test_one_without_a_code_has_its_status_said(self, acme: Party) -> None:
        hour = timezone.now().replace(minute=0, second=0, microsecond=0)
        refusals_add({RefusalKey(acme.tenant.id, hour, "/v1/completions", 400, ""): 2})
        assert b"<td>Bad Request</td>" in browser_of(acme.viewer).get(PAGE).content

    def test_none_is_said_too(self, acme: Party) -> None:
        assert b"No request was refused." in browser_of(acme.viewer).get(PAGE).content
