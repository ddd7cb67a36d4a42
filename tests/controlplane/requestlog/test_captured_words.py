"""Captured words are read with `requests:content` alone, whatever has been made of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rest_framework.test import APIClient

from controlplane.evaluations.models import Case, Evaluation, Result, SuiteVersion
from controlplane.requestlog.capture import captures_keep
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Role, User
from controlplane.tenants.permissions import DEVELOPER
from controlplane.tenants.services import member_add
from controlplane.training.datasets import pulls
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset
from tests.controlplane.conftest import Party, as_user
from tests.controlplane.console.conftest import browser_of
from tests.controlplane.requestlog.test_capture import key_of, switch_on, words

pytestmark = pytest.mark.django_db

SECRET = "Schroedinger-4711"
PLAIN = json.dumps(
    {
        "messages": [
            {"role": "user", "content": "plain question"},
            {"role": "assistant", "content": "plain answer"},
        ]
    }
).encode()
JUDGED = [{"type": "judge", "judge": "strict"}]


@pytest.fixture
def developer(acme: Party) -> APIClient:
    """A key with all scopes of a developer."""
    client = APIClient()
    client.credentials(**key_of(acme, *DEVELOPER))
    return client


@pytest.fixture
def person(acme: Party) -> User:
    """A developer who uses the console."""
    with tenant_scope(acme.tenant.pk):
        return member_add(
            email="dev@acme.example", role=Role.DEVELOPER, password="Pa-55-word!"
        ).user


@pytest.fixture
def captured(acme: Party) -> None:
    """The dataset `users`, made of a captured request."""
    switch_on(acme)
    captures_keep([words(acme, SECRET)])
    post(as_user(acme.owner), "datasets/users/from-captured", {})


def post(client: APIClient, path: str, body: Any, status: int = 201) -> Any:
    answer = client.post(f"/api/v1/{path}", body, format="json")
    assert answer.status_code == status, answer.content
    return answer.json()


def add_plain(acme: Party, name: str, *, appends: bool, content: bytes = PLAIN) -> None:
    with tenant_scope(acme.tenant.pk):
        dataset_services.dataset_upload(name=name, content=content, appends=appends)


def previews(client: APIClient, name: str = "users") -> bool:
    answer = client.get(f"/api/v1/datasets/{name}/preview?limit=100")
    assert answer.status_code in (200, 403)
    assert answer.status_code == 403 or answer.json()["data"]
    return answer.status_code == 200


def evaluate(acme: Party, name: str) -> tuple[str, str]:
    """Make two evaluations of a suite's newest version, as if they had run. -> their ids"""
    with tenant_scope(acme.tenant.pk):
        version = SuiteVersion.objects.filter(suite__name=name).order_by("-number")[0]
        made = []
        for number in range(2):
            run = Evaluation.objects.create(
                suite_version=version, model="m", served="m", status="succeeded"
            )
            for case in Case.objects.filter(suite_version=version):
                output = f"{number} of {case.expected}"
                Result.objects.create(evaluation=run, case=case, output=output, score=number)
            made.append(str(run.pk))
    return made[0], made[1]


def test_rows_that_were_captured_need_the_right_to_read_them(
    acme: Party, captured: None, developer: APIClient
) -> None:
    admin = as_user(acme.owner)
    assert previews(admin) and not previews(developer)
    add_plain(acme, "users", appends=True)  # behind them
    assert previews(admin) and not previews(developer)
    add_plain(acme, "users", appends=False)
    assert previews(developer), "they were replaced"
    captures_keep([words(acme, f"{SECRET} again")])
    post(admin, "datasets/users/from-captured", {"append": True})
    assert not previews(developer), "they are behind others"


def test_so_do_those_of_a_restored_version_and_of_a_source(
    acme: Party, captured: None, developer: APIClient
) -> None:
    admin = as_user(acme.owner)
    add_plain(acme, "users", appends=True)
    post(developer, "datasets/users/restore", {"version": 1}, 200)
    assert not previews(developer)
    source = {"kind": "captured", "only": "all"}
    answer = admin.put("/api/v1/datasets/pulled/source", source, format="json")
    assert answer.status_code == 200, answer.content
    assert developer.post("/api/v1/datasets/pulled/pulls").status_code == 202
    assert pulls.pull_next()
    assert previews(admin, "pulled") and not previews(developer, "pulled")


def test_the_same_bytes_uploaded_stay_captured(
    acme: Party, captured: None, developer: APIClient
) -> None:
    """They share an object in the store, whoever came last."""
    row = {
        "messages": [
            {"role": "user", "content": SECRET},
            {"role": "assistant", "content": f"answer to {SECRET}"},
        ]
    }
    add_plain(acme, "copy", appends=False, content=json.dumps(row).encode() + b"\n")
    with tenant_scope(acme.tenant.pk):
        assert len(set(Dataset.objects.values_list("sha256", flat=True))) == 1
    assert not previews(developer, "copy")


def test_a_report_quotes_no_line_of_them(acme: Party, captured: None, developer: APIClient) -> None:
    findings = {"count": 1, "lines": [[1, f"quoted: {SECRET}"]]}
    report = {"duplicates": {"count": 2, "lines": [[2, 1]]}, "bases": {"tiny": {"tokens": 7}}}
    report["bases"]["tiny"]["refused"] = findings
    with tenant_scope(acme.tenant.pk):
        Dataset.objects.update(report=report, report_status="ready")
    path = "/api/v1/datasets/users/report"
    assert as_user(acme.owner).get(path).json()["bases"]["tiny"]["refused"] == findings
    told = developer.get(path).json()
    assert told["bases"]["tiny"]["refused"] == {"count": 1, "lines": []}
    assert (told["duplicates"], told["bases"]["tiny"]["tokens"]) == ({"count": 2, "lines": []}, 7)


def test_cases_and_answers_of_them_need_it_too(
    acme: Party, captured: None, developer: APIClient
) -> None:
    admin, source = as_user(acme.owner), {"from_dataset": {"dataset": "users"}}
    for name in ("users", "users@1"):
        source["from_dataset"]["dataset"] = name
        post(developer, "suites/s/versions", source, 403)
    assert post(admin, "suites/s/versions", source)["has_requests"]
    one, other = evaluate(acme, "s")
    paths = {
        "suites/s/versions/1/cases": 403,
        f"evaluations/{one}/results": 403,
        f"evaluations/compare?before={one}&after={other}": 200,
    }
    for path, status in paths.items():
        told = developer.get(f"/api/v1/{path}")
        assert (told.status_code, SECRET in told.content.decode()) == (status, False), path
        shown = admin.get(f"/api/v1/{path}")
        assert (shown.status_code, SECRET in shown.content.decode()) == (200, True), path
    assert (told.json()["num_better"], told.json()["changed"]) == (1, [])


def test_a_case_that_is_added_keeps_it(acme: Party, captured: None, person: User) -> None:
    admin = as_user(acme.owner)
    post(admin, "suites/s/versions", {"from_dataset": {"dataset": "users"}})
    form = {
        "name": "s",
        "messages": json.dumps([{"role": "user", "content": "x"}]),
        "expected": "y",
        "checks": "exact",
        "save": "1",
    }
    assert browser_of(person).post("/console/suites/add-case", form).status_code == 302
    # And a case that is a request's marks a suite that had none.
    own = {"cases": [{"messages": [{"role": "user", "content": "x"}], "expected": "y"}]}
    post(admin, "suites/own/versions", own)
    form |= {"name": "own", "is_request": "True"}
    assert browser_of(acme.owner).post("/console/suites/add-case", form).status_code == 302
    with tenant_scope(acme.tenant.pk):
        found = SuiteVersion.objects.order_by("suite__name", "number")
        assert list(found.values_list("suite__name", "number", "has_requests")) == [
            *(("own", 1, False), ("own", 2, True), ("s", 1, True), ("s", 2, True)),
        ]


def test_the_address_of_a_judge_that_gets_them_needs_it_too(
    acme: Party, captured: None, developer: APIClient
) -> None:
    fields = {"url": "https://8.8.8.8/v1", "model": "m"}
    admin, path = as_user(acme.owner), "/api/v1/judges/strict"
    assert developer.put(path, fields, format="json").status_code == 200
    asked = {"dataset": "users", "checks": JUDGED}
    post(admin, "suites/s/versions", {"from_dataset": asked})
    assert developer.put(path, fields, format="json").status_code == 403
    assert developer.delete(path).status_code == 204
    assert developer.put(path, fields, format="json").status_code == 403
    assert admin.put(path, fields, format="json").status_code == 200
    assert developer.put(f"{path}-not", fields, format="json").status_code == 200


def test_no_page_of_the_console_shows_them(acme: Party, captured: None, person: User) -> None:
    admin = as_user(acme.owner)
    post(admin, "suites/s/versions", {"from_dataset": {"dataset": "users"}})
    one, other = evaluate(acme, "s")
    pages = (
        "/console/training/datasets/users",
        "/console/suites/s",
        f"/console/evaluations/compare?before={one}&after={other}",
    )
    for page in pages:
        poor, rich = (browser_of(user).get(page) for user in (person, acme.owner))
        assert (poor.status_code, rich.status_code) == (200, 200), page
        assert SECRET in rich.content.decode(), page
        assert SECRET not in poor.content.decode(), page
        assert "the right to read prompts and answers" in poor.content.decode(), page


def test_words_of_no_request_need_it_not(acme: Party, developer: APIClient) -> None:
    add_plain(acme, "plain", appends=False)
    assert previews(developer, "plain")
    made = post(developer, "suites/p/versions", {"from_dataset": {"dataset": "plain"}})
    assert not made["has_requests"]
    one, other = evaluate(acme, "p")
    assert developer.get("/api/v1/suites/p/versions/1/cases").status_code == 200
    assert developer.get(f"/api/v1/evaluations/{one}/results").status_code == 200
    path = f"/api/v1/evaluations/compare?before={one}&after={other}"
    assert developer.get(path).json()["changed"]
