"""Suites, evaluations and captured requests in the console."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

import pytest

from controlplane.adapters.models import BaseModel
from controlplane.evaluations.models import Case, Evaluation, Suite
from controlplane.requestlog.capture import capture_policy, captures_keep
from controlplane.requestlog.captured import feedback_give
from controlplane.requestlog.models import CapturedRequest
from controlplane.requestlog.services import Words, contents_keep, log_policy_set
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets.services import dataset_upload
from controlplane.training.models import Dataset, TrainingRun
from tests.controlplane.conftest import Party
from tests.controlplane.console.conftest import browser_of

pytestmark = pytest.mark.django_db


def words(party: Party, text: str) -> Words:
    return Words(
        tenant_id=party.tenant.pk,
        request_id=f"req_{uuid.uuid4().hex}",
        store=None,
        prompt={"messages": [{"role": "user", "content": text}]},
        outputs=[f"answer to {text}"],
        finish_reason="stop",
        is_truncated=False,
        model="support",
        is_row=True,
    )


def rows(number: int) -> bytes:
    messages = [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": f"answer {number}"},
    ]
    return json.dumps({"messages": messages}).encode() + b"\n"


def cases(party: Party) -> list[tuple[str, str, list[Any], str]]:
    """Prompt, expected answer, checks and slice of each case of the newest version."""
    with tenant_scope(party.tenant.pk):
        version = Suite.objects.get().versions.order_by("-number")[0]
        found = Case.objects.filter(suite_version=version).order_by("position")
        return [
            (case.messages[-1]["content"], case.expected, case.checks, case.slice) for case in found
        ]


def test_a_suite_is_made_of_a_datasets_rows(acme: Party) -> None:
    with tenant_scope(acme.tenant.pk):
        dataset_upload(name="held-out", content=b"".join(rows(n) for n in range(6)))
    browser = browser_of(acme.owner)
    form = {
        "name": "greetings",
        "dataset": "held-out",
        "every": "2",
        "offset": "1",
        "checks": ["exact", "similarity"],
        "slice": "odd",
    }
    made = browser.post("/console/suites/new", form, follow=True)
    assert made.redirect_chain == [("/console/suites/greetings", 302)]
    page = made.content.decode()
    assert "“greetings@1” has 3 cases." in page and "question 3" in page
    checks = [{"type": "exact"}, {"type": "similarity"}]
    assert cases(acme) == [(f"question {n}", f"answer {n}", checks, "odd") for n in (1, 3, 5)]
    assert "greetings" in browser_of(acme.viewer).get("/console/evaluations").content.decode()


def test_a_suite_is_made_of_cases_and_grows(acme: Party) -> None:
    browser = browser_of(acme.owner)
    case = {"messages": [{"role": "user", "content": "hi"}], "expected": "hello"}
    own = {**case, "checks": [{"type": "contains", "value": "x"}], "slice": "own"}
    form = {
        "name": "greetings",
        "cases": f"{json.dumps(case)}\n\n{json.dumps(own)}",
        "checks": ["exact"],
    }
    assert browser.post("/console/suites/new", form).status_code == 302
    more = {
        "save": "1",
        "name": "greetings",
        "messages": json.dumps([{"role": "user", "content": "bye"}]),
        "expected": "goodbye",
        "checks": ["similarity"],
    }
    assert browser.post("/console/suites/add-case", more).status_code == 302
    assert cases(acme) == [
        ("hi", "hello", [{"type": "exact"}], ""),
        ("hi", "hello", own["checks"], "own"),
        ("bye", "goodbye", [{"type": "similarity"}], ""),
    ]
    with tenant_scope(acme.tenant.pk):
        assert Suite.objects.get().last_number == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cases": "{"}, "Line 1 is no JSON object."),
        ({"cases": ""}, "one of the two"),
        ({"cases": '{"messages": [], "expected": "x"}'}, "cases.0"),
        ({"cases": '{"messages": 3, "expected": "x"}'}, "cases.0"),
        ({"name": "No Slug"}, "lower-case"),
        ({"checks": []}, "This field is required"),
    ],
)
def test_a_broken_suite_says_why(acme: Party, changes: dict[str, Any], said: str) -> None:
    case = {"messages": [{"role": "user", "content": "hi"}], "expected": "hello"}
    form = {"name": "greetings", "cases": json.dumps(case), "checks": ["exact"], **changes}
    answer = browser_of(acme.owner).post("/console/suites/new", form)
    assert answer.status_code == 422 and said in answer.content.decode()
    with tenant_scope(acme.tenant.pk):
        assert not Suite.objects.exists()


def test_a_request_becomes_a_case(acme: Party, globex: Party) -> None:
    with tenant_scope(acme.tenant.pk):
        log_policy_set(content="all", content_days=1, metadata_days=1)
    kept = words(acme, "a <b>question</b>")
    contents_keep([kept])
    page = browser_of(acme.owner).post("/console/suites/add-case", {"request": kept.request_id})
    text = page.content.decode()
    assert "a &lt;b&gt;question&lt;/b&gt;" in text and "answer to a" in text
    # Who may not read prompts does not read them so, and a stranger has none.
    assert browser_of(acme.viewer).post(
        "/console/suites/add-case", {"request": kept.request_id}
    ).status_code == 403  # fmt: skip
    theirs = browser_of(globex.owner).post("/console/suites/add-case", {"request": kept.request_id})
    assert "answer to a" not in theirs.content.decode()
    assert "No content is stored" in theirs.content.decode()


def test_a_suite_is_run_and_cancelled(acme: Party, base_model: BaseModel) -> None:
    browser = browser_of(acme.owner)
    case = {"messages": [{"role": "user", "content": "hi"}], "expected": "hello"}
    form = {"name": "greetings", "cases": json.dumps(case), "checks": ["exact"]}
    browser.post("/console/suites/new", form)
    run = {"model": base_model.name, "suite": "greetings", "max_tokens": "9"}
    done = browser.post("/console/evaluations/run", run, follow=True)
    assert done.redirect_chain == [("/console/evaluations", 302)]
    with tenant_scope(acme.tenant.pk):
        evaluation = Evaluation.objects.get()
    assert (evaluation.max_tokens, evaluation.status) == (9, "queued")
    cancel = f"/console/evaluations/{evaluation.pk}/cancel"
    assert cancel in done.content.decode()
    browser.post(cancel)
    with tenant_scope(acme.tenant.pk):
        evaluation.refresh_from_db()
    assert evaluation.status == "cancelled"
    wrong = browser.post("/console/evaluations/run", {**run, "model": "nobodys"})
    assert wrong.status_code == 422 and 'id="id_model_error"' in wrong.content.decode()
    assert browser.post("/console/suites/greetings/delete", follow=True).status_code == 200
    with tenant_scope(acme.tenant.pk):
        assert not Suite.objects.exists()


CAPTURE = {"share": "0.5", "shares": "support 1\n", "days": "7", "max_rows": "10", "max_mib": "1"}


def test_captured_requests_become_a_dataset_and_are_erased(acme: Party) -> None:
    browser = browser_of(acme.owner)
    assert browser.post("/console/settings/capture", CAPTURE).status_code == 302
    with tenant_scope(acme.tenant.pk):
        policy = capture_policy()
    assert (policy.share, policy.shares, policy.days) == (0.5, {"support": 1.0}, 7)
    assert "support 1" in browser.get("/console/settings").content.decode()
    good, plain = words(acme, "good one"), words(acme, "plain one")
    captures_keep([good, plain])
    with tenant_scope(acme.tenant.pk):
        feedback_give(request_id=good.request_id, rating="good", answer="better")
    page = browser.get("/console/captured").content.decode()
    assert good.request_id in page and "good, corrected" in page
    assert "good one" not in page  # texts are not shown here
    form = {"name": "from-users", "only": "good"}
    made = browser.post("/console/captured/dataset", form, follow=True)
    assert made.redirect_chain == [("/console/training/datasets/from-users", 302)]
    assert re.search(r"“from-users” is stored, with 1 chats\.", made.content.decode())
    with tenant_scope(acme.tenant.pk):
        assert Dataset.objects.get().num_rows == 1
    none = browser.post("/console/captured/dataset", {**form, "model": "nobodys"})
    assert none.status_code == 422
    browser.post("/console/captured/erase")
    with tenant_scope(acme.tenant.pk):
        assert not CapturedRequest.objects.exists()


@pytest.mark.parametrize(
    "changes", [{"share": "2"}, {"shares": "support"}, {"shares": "support 7"}, {"max_mib": "0"}]
)
def test_wrong_capture_settings_are_said(acme: Party, changes: dict[str, str]) -> None:
    answer = browser_of(acme.owner).post("/console/settings/capture", {**CAPTURE, **changes})
    (name,) = changes
    assert answer.status_code == 422 and f'id="id_{name}_error"' in answer.content.decode()


def test_a_run_with_validation_is_paused_and_resumed(acme: Party, base_model: BaseModel) -> None:
    with tenant_scope(acme.tenant.pk):
        for name in ("chats", "held-out"):
            dataset_upload(name=name, content=b"".join(rows(n) for n in range(4)))
    browser = browser_of(acme.owner)
    form = {"adapter": "support", "dataset": "chats", "patience": "3", "eval_steps": "5"}
    refused = browser.post("/console/training/runs", form)
    assert refused.status_code == 422 and "It needs rows to validate with" in str(refused.content)
    share = {**form, "validation_share": "0.25", "max_length": "64"}
    begun = browser.post("/console/training/runs", share)
    both = browser.post("/console/training/runs", {**share, "validation_dataset": "held-out"})
    assert both.status_code == 422
    with tenant_scope(acme.tenant.pk):
        run = TrainingRun.objects.get()
    assert run.hyperparameters == {
        **{"validation_share": 0.25, "max_length": 64, "patience": 3, "eval_steps": 5}
    }
    browser.post(f"{begun.url}/pause")
    page = browser.get(begun.url).content.decode()
    assert "Paused" in page and f'action="{begun.url}/resume"' in page
    browser.post(f"{begun.url}/resume")
    assert f'action="{begun.url}/pause"' in browser.get(begun.url).content.decode()
    own = browser.post("/console/training/runs", {**form, "validation_dataset": "held-out"})
    assert own.status_code == 302
    with tenant_scope(acme.tenant.pk):
        newest = TrainingRun.objects.order_by("-created_at")[0]
        assert newest.validation_dataset is not None
        assert newest.validation_dataset.name == "held-out"


def test_a_suite_of_many_cases_is_one_request(acme: Party, client: Any) -> None:
    """Cases have more room than other bodies, which end at 256 KiB; but not any."""
    text = "x" * 10_000
    case = {"messages": [{"role": "user", "content": text}], "expected": "y"}
    send: dict[str, Any] = {"content_type": "application/json"}
    headers = {"HTTP_AUTHORIZATION": acme.header, "HTTP_IDEMPOTENCY_KEY": "one"}
    path = "/api/v1/suites/long/versions"
    made = client.post(path, data=json.dumps({"cases": [case] * 150}), **send, **headers)
    assert (made.status_code, made.json().get("num_cases")) == (201, 150), made.content
    headers["HTTP_IDEMPOTENCY_KEY"] = "two"
    longer = client.post(path, data=json.dumps({"cases": [case] * 230}), **send, **headers)
    assert longer.status_code == 413
    other = client.put("/api/v1/judges/j", data=json.dumps({"url": text * 30}), **send, **headers)
    assert other.status_code == 413
