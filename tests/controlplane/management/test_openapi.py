"""The OpenAPI document names what clients rely on, and what it says is kept, for every tenant."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rest_framework.test import APIClient

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.aliases import ramps
from controlplane.aliases import services as aliases
from controlplane.aliases.contents import Contents, Part
from controlplane.evaluations import suites
from controlplane.evaluations.models import Evaluation, Judge, SuiteVersion
from controlplane.events.audit.models import AuditEvent
from controlplane.events.outbox.models import OutboxEvent
from controlplane.gateway import urls as gateway_urls
from controlplane.requestlog import sealing
from controlplane.requestlog import services as request_log
from controlplane.requestlog.capture import capture_policy_set
from controlplane.requestlog.inference_request import InferenceRequest
from controlplane.requestlog.models import CapturedRequest
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants import auth, people
from controlplane.tenants.models import Membership, Role
from controlplane.training.models import Dataset, DatasetSource, TrainingRun
from controlplane.usage.limits.services import budget_set, rate_limit_set
from controlplane.usage.models import UsageRecord
from controlplane.webhooks.models import WebhookDelivery, WebhookEndpoint
from controlplane.webhooks.signing import seal
from tests.controlplane.conftest import Party, as_user
from tests.openapi import generated

DOCS = Path(__file__).parents[3] / "docs"
METHODS = ("get", "put", "post", "patch", "delete")
DOCUMENT = generated()
#: (method, path) of every operation whose address names something of a tenant.
WITH_ID = [
    (method, path)
    for path, item in DOCUMENT["paths"].items()
    for method in METHODS
    if method in item and "{" in path and path.startswith("/api/v1/")
]


def test_every_call_that_the_docs_name_is_in_it() -> None:
    """`GET /api/v1/datasets/{name}/report` in a page of docs/: clients are told of it."""
    described = {
        (method, re.sub(r"{[^}]*}", "{}", path))
        for path, item in DOCUMENT["paths"].items()
        for method in METHODS
        if method in item
    }
    named = re.compile(
        r"\b(GET|PUT|POST|PATCH|DELETE) ((?:/api|/ops)?/v1/[\w/{}.-]*[\w}])(?![\w@…/-])"
    )
    calls = [
        (page.name, method.lower(), re.sub(r"{[^}]*}", "{}", path))
        for page in sorted(DOCS.glob("*.md"))
        for method, path in named.findall(page.read_text())
    ]
    assert len(calls) > 30
    assert [call for call in calls if call[1:] not in described] == []


def test_operation_ids_are_unique() -> None:
    """Generated clients name their functions by them."""
    ids = [
        item[method]["operationId"]
        for item in DOCUMENT["paths"].values()
        for method in METHODS
        if method in item
    ]
    assert len(ids) == len(set(ids))


def test_making_it_leaves_nothing_behind() -> None:
    assert generated() == DOCUMENT


def test_the_gateway_is_in_it() -> None:
    body = DOCUMENT["components"]["schemas"]["ChatBody"]
    assert {"model", "messages", "top_k"} <= set(body["properties"])


def test_no_component_takes_anothers_name() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert "part_ids" in schemas["CompleteBody"]["properties"]
    uploads = schemas["VersionCreated"]["properties"]["uploads"]["additionalProperties"]
    assert set(schemas[uploads["$ref"].rpartition("/")[2]]["properties"]) == {
        *("url", "method", "headers"),
    }
    assert schemas["Upload"]["properties"]["object"] == {"const": "upload"}


#: Answered with a 404 whoever asks.
NOWHERE = {"responses/{response_id}", "responses/{response_id}/{rest}", "{path}"}


def test_every_address_of_the_gateway_is_in_it() -> None:
    routes = {re.sub(r"<\w+:(\w+)>", r"{\1}", str(p.pattern)) for p in gateway_urls.urlpatterns}
    taken_past_django = {"uploads/{upload_id}/parts"}  # by files.receiver
    described = {path.removeprefix("/v1/") for path in DOCUMENT["paths"] if path[:4] == "/v1/"}
    assert (routes - NOWHERE) | taken_past_django == described


def test_no_reference_leads_nowhere() -> None:
    text = json.dumps(DOCUMENT)
    for reference in set(text.split('"$ref": "')[1:]):
        *parents, name = reference.split('"')[0].removeprefix("#/").split("/")
        place = DOCUMENT
        for parent in parents:
            place = place[parent]
        assert name in place


#: What each parameter of a path names: makes one and gives its id.
Maker = Callable[[Party, BaseModel], Any]


def _owner(party: Party) -> auth.Principal:
    return auth.Principal(tenant=party.tenant, role=Role.OWNER, user=party.owner)


def _adapter(party: Party, base_model: BaseModel) -> Adapter:
    adapter, _ = Adapter.objects.get_or_create(name="acmes", defaults={"base_model": base_model})
    AdapterVersion.objects.get_or_create(adapter=adapter, number=1)
    return adapter


def _alias(party: Party, base_model: BaseModel) -> str:
    adapter = _adapter(party, base_model)
    adapter.versions.update(status=AdapterVersion.Status.READY)
    part = Part(adapter=adapter.name, version=1)
    contents = Contents(primary=(part,), canary=(dataclasses.replace(part, weight=0.5),))
    alias = aliases.alias_create(name="theirs", contents=contents)
    ramps.ramp_start(alias=alias, steps=ramps.DEFAULT_STEPS)
    return alias.name


def _dataset() -> Dataset:
    return Dataset.objects.get_or_create(
        name="acmes", defaults={"sha256": "0" * 64, "num_bytes": 1, "num_rows": 1}
    )[0]


def _run(party: Party, base_model: BaseModel) -> uuid.UUID:
    return TrainingRun.objects.create(
        adapter=_adapter(party, base_model), dataset=_dataset(), dataset_sha256="0" * 64
    ).pk


def _request(party: Party, base_model: BaseModel) -> str:
    InferenceRequest.objects.create(
        request_id="req_of_acme",
        model="acmes",
        base_model="tiny",
        worker_id="w",
        finish_reason="stop",
        accepted_at=party.tenant.created_at,
    )
    UsageRecord.objects.create(
        request_id="req_of_acme",
        model="acmes",
        base_model="tiny",
        prompt_tokens=1,
        completion_tokens=1,
        finish_reason="stop",
        occurred_at=party.tenant.created_at,
    )
    request_log.log_policy_set(content="all", content_days=30, metadata_days=90)
    words = request_log.Words(
        tenant_id=party.tenant.id,
        request_id="req_of_acme",
        store=None,
        prompt={"text": "p"},
        outputs=["a"],
        finish_reason="stop",
        is_truncated=False,
    )
    assert request_log.contents_keep([words]) == 1
    return "req_of_acme"


def _sourced(dataset: Dataset) -> Dataset:
    DatasetSource.objects.create(name=dataset.name, kind="hub", place={}, sealed=b"x")
    return dataset


def _invite(party: Party, base_model: BaseModel) -> uuid.UUID:
    return people.invite_create(by=_owner(party), email="x@acme.example", role=Role.VIEWER)[0].pk


def _account(party: Party, base_model: BaseModel) -> uuid.UUID:
    made = people.service_account_create(by=_owner(party), name="ci", role=Role.DEVELOPER)
    return made.pk


def _webhook(party: Party, base_model: BaseModel) -> uuid.UUID:
    """A webhook, and a delivery with the same id."""
    fields = {"url": "https://example.com/", "sealed_secret": seal("whsec_MfKQ9r8GKYqrTwjU")}
    made = WebhookEndpoint.objects.create(**fields)
    event = OutboxEvent.objects.create(type="version.ready")
    WebhookDelivery.objects.create(id=made.pk, endpoint=made, event=event)
    return made.pk


def _suite() -> SuiteVersion:
    case = {"messages": [{"role": "user", "content": "x"}], "expected": "y"}
    return suites.suite_version_create(name="acmes", cases=[case], origin={})


def _evaluation(party: Party, base_model: BaseModel) -> uuid.UUID:
    return Evaluation.objects.create(suite_version=_suite(), model="tiny", served="tiny").pk


def _captured(party: Party, base_model: BaseModel) -> str:
    policy = capture_policy_set(share=1, shares={}, days=1, max_rows=9, max_bytes=1 << 20)
    content = {
        "request_id": "req_captured",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [],
        "output": "y",
    }
    sealed = sealing.seal(content, bytes(policy.wrapped_key))
    row = CapturedRequest.objects.create(
        request_id="req_captured", model="m", sealed=sealed, num_bytes=len(sealed)
    )
    return row.request_id


MAKERS: dict[str, Maker] = {
    "members/{member_id}": lambda p, b: Membership.objects.get(user=p.viewer).pk,
    "invites/{invite_id}": _invite,
    "service-accounts/{account_id}": _account,
    "keys/{public_id}": lambda p, b: p.api_key.public_id,
    "adapters/{name}": lambda p, b: _adapter(p, b).name,
    "aliases/{name}": _alias,
    "datasets/{name}": lambda p, b: _sourced(_dataset()).name,
    "training-runs/{run_id}": _run,
    "limits/{limit_id}": lambda p, b: rate_limit_set(model="x", max_waiting=1).pk,
    "budgets/{budget_id}": lambda p, b: budget_set(hard_limit=1).pk,
    "requests/{request_id}": _request,
    "captured-requests/{request_id}": _captured,
    "webhooks/{webhook_id}": _webhook,
    "suites/{name}": lambda p, b: _suite().suite.name,
    "evaluations/{evaluation_id}": _evaluation,
    "judges/{name}": lambda p, b: Judge.objects.create(name="acmes", url="", model="m").name,
    "audit-events/{event_id}": lambda p, b: AuditEvent.objects.order_by("seq")[0].pk,
}
#: Bodies that get past the check of fields, so that only the owner of the thing decides.
BODIES: dict[str, Any] = {
    "patch members/{member_id}": {"role": "viewer"},
    "patch service-accounts/{account_id}": {"role": "viewer"},
    "patch keys/{public_id}": {"name": "taken"},
    "post aliases/{name}/ramp": {"percent": 1},
    "put adapters/{name}/schedule": {"dataset": "acmes", "cron": "0 3 * * *"},
    "post datasets/{name}/restore": {"version": 1},
}
#: A stranger who begins a version makes an adapter of their own: nothing of acme's is named.
MAKES_ITS_OWN = {
    ("post", "/api/v1/adapters/{name}/versions"),
    ("post", "/api/v1/adapters/{name}/import"),
    ("post", "/api/v1/suites/{name}/versions"),
    ("put", "/api/v1/judges/{name}"),
    ("post", "/api/v1/datasets/{name}/versions"),
    ("put", "/api/v1/datasets/{name}/source"),
    ("post", "/api/v1/datasets/{name}/from-captured"),
}


def make_named(path: str, party: Party, base_model: BaseModel) -> tuple[str, Any]:
    """Makes what an address names: the name of its parameter, and the id to put there."""
    short = path.removeprefix("/api/v1/")
    kind = next((kind for kind in MAKERS if f"{short}/".startswith(f"{kind}/")), None)
    assert kind is not None, f"say in MAKERS how to make what {path} names"
    with tenant_scope(party.tenant.id):
        made = MAKERS[kind](party, base_model)
    return kind[kind.index("{") + 1 : kind.index("}")], made


def _is_like(made: Any) -> str:
    """An id of the same kind that nobody has."""
    if isinstance(made, uuid.UUID):
        return str(uuid.uuid4())
    return "Z" * len(made) if made.isalnum() and len(made) == 22 else "nobodys"


@pytest.mark.parametrize(("method", "path"), WITH_ID, ids=[f"{m} {p}" for m, p in WITH_ID])
def test_anothers_thing_and_no_thing_are_one_answer(
    acme: Party, globex: Party, base_model: BaseModel, method: str, path: str
) -> None:
    if (method, path) in MAKES_ITS_OWN:
        pytest.skip("makes what it names")
    short = path.removeprefix("/api/v1/")
    parameter, made = make_named(path, acme, base_model)

    def ask(client: APIClient, thing: str) -> Any:
        url = path.replace(f"{{{parameter}}}", thing).replace("{number}", "1")
        url = url.replace("{delivery_id}", thing)
        assert "{" not in url
        return getattr(client, method)(url, BODIES.get(f"{method} {short}", {}), format="json")

    stranger = as_user(globex.owner)
    theirs, missing = ask(stranger, str(made)), ask(stranger, _is_like(made))
    assert (theirs.status_code, missing.status_code) == (404, 404), theirs.content
    assert theirs.content == missing.content
    ignored = {"Date", "X-Request-Id"}
    assert {k: v for k, v in theirs.items() if k not in ignored} == {
        k: v for k, v in missing.items() if k not in ignored
    }
    # It is there, for those whose it is: else the 404s above would prove nothing.
    assert ask(as_user(acme.owner), str(made)).status_code != 404 or short.endswith(
        ("/schedule", "/schedule/run", "/schedule/runs", "/gate")
    )
