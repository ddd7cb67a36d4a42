"""The request log in a browser: it goes on by itself, and only while that disturbs nobody."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Site

pytestmark = pytest.mark.browser

#: Writes the record of a request of acme's, as the accountant does, and what it said.
SETTLE = """
import time, uuid
from controlplane.requestlog.services import Words, contents_keep, log_policy_set
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.usage.services import usage_settle
from contract.messages.protocol import DoneRecord
tenant = Tenant.objects.get(slug="acme")
for name in {names!r}:
    usage_settle([DoneRecord(
        request_id=name, tenant_id=str(tenant.id), api_key_id=str(uuid.uuid4()), worker_id="w1",
        lease=1, model="logged", base_model="smollm2-135m-instruct", adapter_version_id=None,
        digests=(), finish_reason="stop", error_code=None, prompt_tokens=12, cached_tokens=0,
        completion_tokens=9, created_at=time.time() - 2, queue_ms=40.0, load_ms=200.0,
        first_token_ms=700.0, total_ms=1900.0, endpoint="/v1/chat/completions",
    )])
with tenant_scope(tenant.id):
    log_policy_set(content="all", content_days=30, metadata_days=90)
contents_keep([Words(
    tenant_id=tenant.id, request_id=name, store=None, finish_reason="stop", is_truncated=False,
    prompt={{"messages": [{{"role": "user", "content": "<script>alert(1)</script> & Co."}}]}},
    outputs=["<b>bold</b> words"],
) for name in {names!r}])
"""
SEE = "Object.defineProperty(document, 'hidden', {get: () => %s, configurable: true})"


def settle(site: Site, *names: str) -> None:
    site.manage("shell", "--verbosity=0", "-c", SETTLE.format(names=names))


def test_new_requests_show_up_by_themselves(page: Page, site: Site) -> None:
    settle(site, "req_first")
    page.goto("/console/requests?model=logged")
    rows = page.locator("#requests tbody tr")
    expect(rows).to_have_count(1)
    picture = rows.first.get_by_role("img")
    expect(picture).to_have_accessible_name(re.compile("^1.9 s in total: queue 40 ms, load 200 ms"))

    page.evaluate(SEE % "true")  # nobody looks
    asked: list[str] = []
    page.on("request", lambda sent: asked.append(sent.url))
    settle(site, "req_second")
    page.wait_for_timeout(5000)  # longer than the page waits between two questions
    assert asked == []
    expect(rows).to_have_count(1)

    page.evaluate(SEE % "false")
    expect(rows).to_have_count(2, timeout=30_000)
    expect(page.locator("#refusals")).to_have_count(1)

    rows.first.get_by_role("link").focus()  # about to be followed
    asked.clear()
    page.wait_for_timeout(5000)
    assert asked == []


def test_an_answer_that_comes_late_disturbs_nobody(page: Page, site: Site) -> None:
    settle(site, "req_held")
    waiting: list[Route] = []
    page.route("**/requests/newest*", lambda route: waiting.append(route))
    page.goto("/console/requests?model=logged")
    link = page.locator("#requests tbody").get_by_role("link").first
    settle(site, "req_behind")
    while not waiting:
        page.wait_for_timeout(100)
    link.focus()  # after the page has asked
    with page.expect_response("**/requests/newest*"):
        waiting.pop().continue_()
    page.wait_for_timeout(500)
    expect(link).to_be_focused()
    expect(link).to_have_attribute("href", "/console/requests/req_held")


def test_one_request_and_its_words(page: Page, site: Site) -> None:
    settle(site, "req_words")
    page.goto("/console/requests")
    page.get_by_label("Model").fill("logged")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**/requests?model=logged")
    page.locator("#requests tbody").get_by_role("link").first.click()
    expect(page.get_by_role("heading", name="req_words")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="prefill")).to_contain_text("460 ms")
    expect(page.get_by_text("<script>alert(1)</script> & Co.", exact=True)).to_be_visible()
    expect(page.get_by_text("<b>bold</b> words", exact=True)).to_be_visible()
    page.set_viewport_size({"width": 360, "height": 740})
    for path in ("/console/requests/req_words", "/console/requests?model=logged"):
        page.goto(path)
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overflow) <= 0, path
