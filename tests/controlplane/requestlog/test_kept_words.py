"""From a client's request to its log line and its stored words, through real processes."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
import pytest

from tests.fakes import FAKE_NAME
from tests.live import LiveStack, wait_for

CHOOSE = """
from controlplane.requestlog.capture import capture_policy_set
from controlplane.requestlog.services import log_policy_set
from controlplane.tenancy.scoping import tenant_scope
import uuid
with tenant_scope(uuid.UUID("{tenant}")):
    log_policy_set(content="{content}", content_days=30, metadata_days=90)
    capture_policy_set(
        share=0, shares=dict.fromkeys({captured}, 1), days=30, max_rows=100, max_bytes=1 << 20
    )
"""
READ = """
from controlplane.requestlog.services import content_get
from controlplane.tenancy.scoping import tenant_scope
import json, uuid
with tenant_scope(uuid.UUID("{tenant}")):
    found = content_get(request_id="{request_id}")
print(json.dumps([found.prompt, found.outputs, found.finish_reason]))
"""


@dataclasses.dataclass(frozen=True)
class Site:
    live: LiveStack
    url: str

    def chat(self, text: str, tenant: str = "acme", **fields: Any) -> httpx.Response:
        body = {
            "model": f"{tenant}-adapter",
            "messages": [{"role": "user", "content": text}],
            **fields,
        }
        key = self.live.tenants[tenant].key
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers, timeout=30)

    def management(self, path: str, tenant: str = "acme") -> Any:
        headers = {"Authorization": f"Bearer {self.live.tenants[tenant].key}"}
        return httpx.get(f"{self.url}/api/v1/{path}", headers=headers, timeout=30)

    def choose(self, content: str, *captured: str, tenant: str = "acme") -> None:
        tenant_id = self.live.tenants[tenant].id
        code = CHOOSE.format(tenant=tenant_id, content=content, captured=list(captured))
        self.live.run("manage.py", "shell", "--verbosity=0", "-c", code)

    def feedback(self, tenant: str = "acme", **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.live.tenants[tenant].key}"}
        return httpx.post(f"{self.url}/v1/feedback", json=body, headers=headers, timeout=30)

    def stored(self, table: str = "requestcontent") -> set[str]:
        with psycopg.connect(self.live.database_url) as connection:
            query = f"select request_id from requestlog_{table}".encode()
            rows = connection.execute(query)
            return {request_id for (request_id,) in rows}

    def words(self, request_id: str, tenant: str = "acme") -> Any:
        tenant_id = self.live.tenants[tenant].id
        code = READ.format(tenant=tenant_id, request_id=request_id)
        return json.loads(self.live.run("manage.py", "shell", "--verbosity=0", "-c", code))


@pytest.fixture(scope="module")
def site(live: LiveStack) -> Iterator[Site]:
    pool = live.with_pool("requestlog")
    Site(pool, "").choose("all", "acme-adapter")  # before the gateway starts: it knows at once
    web, url = pool.start_web()
    worker = pool.start_worker("requestlog-worker")
    accountant = pool.start_accountant()
    made = Site(pool, url)
    yield made
    made.choose("off")
    for process in (web, worker, accountant):
        process.stop(60)


def test_words_and_line_of_a_request(site: Site) -> None:
    answer = site.chat("keep these words")
    request_id = answer.headers["x-request-id"]
    wait_for(lambda: request_id in site.stored(), timeout_s=60, what="the words")
    prompt, outputs, reason = site.words(request_id)
    assert prompt == {"messages": [{"role": "user", "content": "keep these words"}]}
    assert (outputs, reason) == (["keep these words"], "stop")
    wait_for(
        lambda: site.management(f"requests/{request_id}").status_code == 200,
        timeout_s=60,
        what="the line",
    )
    line = site.management(f"requests/{request_id}").json()
    usage = answer.json()["usage"]
    assert (line["endpoint"], line["status"], line["has_content"]) == (
        *("/v1/chat/completions", 200, True),
    )
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["completion_tokens"] == usage["completion_tokens"]
    assert 0 <= line["queue_ms"] <= line["total_ms"]
    assert 0 < line["first_token_ms"] <= line["total_ms"]
    assert len(line["digests"]) == 1
    assert (line["weights"], line["attempts"]) == ([1.0], 1)
    assert "stop" not in line["sampling"]
    listed = site.management("requests?endpoint=/v1/chat/completions&stream=false").json()
    assert request_id in {row["id"] for row in listed["data"]}


def test_streamed_words_are_kept_whole(site: Site) -> None:
    answer = site.chat("a streamed answer", stream=True)
    request_id = answer.headers["x-request-id"]
    wait_for(lambda: request_id in site.stored(), timeout_s=60, what="the words")
    assert site.words(request_id)[1:] == [["a streamed answer"], "stop"]


def test_a_request_that_says_no_and_a_tenant_that_said_nothing_leave_no_words(site: Site) -> None:
    silent = site.chat("not these", store=False)
    others = site.chat("nor these", tenant="globex", store=True)
    last = site.chat("but these")
    wait_for(lambda: last.headers["x-request-id"] in site.stored(), timeout_s=60, what="the words")
    kept = site.stored()
    assert silent.headers["x-request-id"] not in kept
    assert others.headers["x-request-id"] not in kept
    # Without words, but not without a line.
    path = f"requests/{others.headers['x-request-id']}"
    wait_for(
        lambda: site.management(path, "globex").status_code == 200,
        timeout_s=60,
        what="the line of globex",
    )
    assert site.management(path).status_code == 404


def test_what_is_refused_is_counted_and_leaves_no_line(site: Site) -> None:
    def counts() -> Counter[str]:
        found: Counter[str] = Counter()
        after = ""
        while True:
            page = site.management(f"refusals?limit=100{after}").json()
            for row in page["data"]:
                if row["endpoint"] == "/v1/chat/completions":
                    found[row["code"]] += row["requests"]  # of every hour
            if not page["has_more"]:
                return found
            after = f"&after={page['last_id']}"

    before = counts()  # other tests on the same platform were refused too
    answers = [site.chat("x", model="nobodys") for _ in range(3)]
    answers.append(site.chat("x", temperature=9))
    assert [answer.status_code for answer in answers] == [404, 404, 404, 400]
    # Each is counted when its process next writes what it counted.
    wait_for(lambda: (counts() - before).total() >= 4, timeout_s=60, what="the counts")
    assert counts() - before == {"model_not_found": 3, "invalid_value": 1}
    for answer in answers:
        path = f"requests/{answer.headers['x-request-id']}"
        assert site.management(path).status_code == 404


def test_a_captured_request_is_rated_and_corrected(site: Site) -> None:
    """Requests to the alias or adapter that the tenant named are captured, and no others."""
    answer, base = site.chat("learn from this"), site.chat("not from this", model=FAKE_NAME)
    silent = site.chat("nor from this", store=False)
    request_id = answer.headers["x-request-id"]
    wait_for(
        lambda: request_id in site.stored("capturedrequest"), timeout_s=60, what="the captured row"
    )
    for other in (base, silent):
        assert other.headers["x-request-id"] not in site.stored("capturedrequest")
    # By the id that OpenAI's clients show, of the answer itself.
    given = site.feedback(request_id=answer.json()["id"], rating="bad", corrected_answer="This.")
    assert given.status_code == 200, given.text
    assert given.json() == {
        "object": "feedback",
        "request_id": request_id,
        "rating": "bad",
        "is_captured": True,
        "has_corrected_answer": True,
    }
    # Of one that was not captured the rating alone is known.
    wait_for(
        lambda: site.feedback(request_id=base.json()["id"], rating="good").status_code == 200,
        timeout_s=60,
        what="the line of the other request",
    )
    lost = site.feedback(request_id=base.json()["id"], corrected_answer="That.").json()
    assert (lost["rating"], lost["is_captured"], lost["has_corrected_answer"]) == (
        *("good", False, False),
    )
    assert site.feedback("globex", request_id=request_id, rating="good").status_code == 404
    for wrong in (
        {"request_id": request_id},
        {"request_id": request_id, "rating": "5 stars"},
        {"request_id": request_id, "rating": "good", "comment": "x"},
        {"request_id": request_id, "corrected_answer": ""},
        {"request_id": request_id, "corrected_answer": {"role": "user", "content": "x"}},
        {"request_id": request_id, "corrected_answer": "x" * 70_000},
        {"request_id": request_id, "corrected_answer": {"content": "\0"}},
        {"rating": "good"},
    ):
        assert site.feedback(**wrong).status_code == 400, wrong
    of_a_user = {"role": "user", "content": "x"}
    refused = site.feedback(request_id=request_id, corrected_answer=of_a_user).json()["error"]
    assert refused["param"] == "corrected_answer"
    listed = site.management("captured-requests?only=corrected")
    assert [row["id"] for row in listed.json()["data"]] == [request_id]


def test_a_choice_holds_at_once_in_every_process(site: Site) -> None:
    """The gateway runs already, and another process makes the choice."""
    before = site.chat("said before", tenant="globex")

    def written() -> set[str]:
        """Return whose words are stored, once those of all requests so far were written."""
        last = site.chat("of acme").headers["x-request-id"]
        wait_for(lambda: last in site.stored(), timeout_s=60, what="the words of acme")
        return site.stored() | site.stored("capturedrequest")

    assert before.headers["x-request-id"] not in written()
    site.choose("all", "globex-adapter", tenant="globex")
    first = site.chat("said first", tenant="globex").headers["x-request-id"]
    wait_for(lambda: first in site.stored(), timeout_s=60, what="the words")
    wait_for(lambda: first in site.stored("capturedrequest"), timeout_s=60, what="the row")
    site.choose("off", tenant="globex")
    after = site.chat("said after", tenant="globex")
    assert after.headers["x-request-id"] not in written()
