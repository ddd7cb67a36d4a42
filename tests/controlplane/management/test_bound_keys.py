"""A key with `allowed_models` reaches no other model by any address of the OpenAPI document.

`bound_world` makes rows of one model; the addresses are walked by a key that is bound to another.
An address that the tables here do not know fails: say there what it names.
"""

from __future__ import annotations

import re
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from rest_framework.test import APIClient

from controlplane.adapters.models import AdapterVersion
from controlplane.tenancy.scoping import TenantModel, tenant_scope
from controlplane.tenants.permissions import OF_ALL_MODELS, SCOPES
from tests.controlplane.conftest import Party
from tests.controlplane.management.bound_world import ALIAS, NAME, World
from tests.controlplane.tenants.test_key_rules import client_of, make
from tests.openapi import generated

pytestmark = pytest.mark.usefixtures("gateway_here")
DOCUMENT = generated()
CONTROLPLANE = Path(__file__).parents[3] / "controlplane"
METHODS = ("get", "put", "post", "patch", "delete")
#: (method, path) of every operation of tenants.
OPERATIONS = [
    (method, path)
    for path, item in DOCUMENT["paths"].items()
    for method in METHODS
    if method in item and not path.startswith("/ops/")
]
#: The beginnings of addresses that name something of a model; `World.ids` has one of each.
OF_A_MODEL = (
    "/api/v1/adapters/{name}",
    "/api/v1/aliases/{name}",
    "/api/v1/training-runs/{run_id}",
    "/api/v1/evaluations/{evaluation_id}",
    "/api/v1/requests/{request_id}",
    "/api/v1/captured-requests/{request_id}",
    "/api/v1/limits/{limit_id}",
    "/v1/models/{name}",
    "/v1/batches/{batch_id}",
    "/v1/files/{file_id}",
    "/v1/fine_tuning/jobs/{job_id}",
)
#: Those that name something of the tenant, and why a list of models does not bind it.
OF_NO_MODEL = {
    "/api/v1/members/{member_id}": "a person",
    "/api/v1/invites/{invite_id}": "a person",
    "/api/v1/service-accounts/{account_id}": "an account; its keys have lists of their own",
    "/api/v1/keys/{public_id}": "a key: test_key_grants.py",
    "/api/v1/budgets/{budget_id}": "tokens of all models",
    "/api/v1/webhooks/{webhook_id}": "no such key has the permission",
    "/api/v1/audit-events/{event_id}": "no such key has the permission",
    "/api/v1/datasets/{name}": "read by all, changed as test_bound_publishing.py says",
    "/api/v1/suites/{name}": "read by all, changed as test_bound_publishing.py says",
    "/api/v1/judges/{name}": "read by all, changed by no such key: test_bound_publishing.py",
    "/v1/uploads/{upload_id}": "bytes that its client sends",
}
#: Bodies that get past the check of fields.
PASSING: dict[str, Any] = {
    "put /api/v1/adapters/{name}/schedule": {"dataset": "rows", "cron": "0 3 * * *"},
    "post /api/v1/adapters/{name}/versions": {
        "files": {"adapter_config.json": 10, "adapter_model.safetensors": 10}
    },
    "post /api/v1/adapters/{name}/import": {"repository": "them/theirs"},
    "post /api/v1/adapters/{name}/versions/{number}/parts": {
        "file": "adapter_model.safetensors",
        "parts": {"1": "0" * 64},
    },
    "post /api/v1/aliases/{name}/ramp": {"percent": 1},
}
#: The names of fields and parameters that may say which model, or whose row, is meant.
NAMING = re.compile(
    r"^(model|adapters?|adapter_id|name|primary|canary|suffix|shares|parameters|before|after|with|"
    r"request_id|requests|from_requests|file|[a-z]+_file(_id)?|adapter_version_id|suite|gate|"
    r"allowed_models|alias|runs?|evaluations?|schedules?|jobs?|batch(es)?|versions?)$"
)
#: By operation: bodies, or queries that begin with "?", which name the other model; None and a
#: reason where the field names no model of the tenant.
BODIES: dict[str, list[Any] | str] = {
    "post /": [{"inputs": "x", "parameters": {"adapter_id": NAME}}],
    "post /generate": [{"inputs": "x", "parameters": {"adapter_id": f"{NAME}@1"}}],
    "post /generate_stream": [{"inputs": "x", "parameters": {"adapter_id": NAME}}],
    "post /classify": [{"inputs": "x", "parameters": {"adapter_id": NAME}}],
    "post /classify_batch": [{"inputs": ["x"], "parameters": {"adapter_id": NAME}}],
    "post /v1/embeddings": [{"model": NAME, "input": "x"}, {"model": ALIAS, "input": "x"}],
    "post /api/v1/adapters": [{"name": NAME}, {"name": "ledger2"}],
    "patch /api/v1/adapters/{name}": "of the adapter in the address; its gate names a suite",
    "get /api/v1/adapters/{name}/versions/{number}/diff": "a version of the one in the address",
    "post /api/v1/aliases": [
        {"name": ALIAS, "primary": {"adapter": "others"}},
        {"name": "others", "primary": {"adapter": NAME}},
        {"name": "others", "primary": {"adapter": "others"}, "canary": {"adapter": NAME}},
        {"name": "others", "primary": [{"adapter": "others"}, {"adapter": NAME, "version": 1}]},
    ],
    "post /api/v1/adapters/{name}/versions/{number}/parts": "one of the two files of a version",
    "patch /api/v1/aliases/{name}": "test_bound_publishing.py",
    "put /api/v1/capture": [{"shares": {NAME: 1.0}}],
    "get /api/v1/captured-requests": "a filter: test_lists_leave_the_others_out",
    "delete /api/v1/captured-requests": "a filter: test_bound_publishing.py",
    "post /api/v1/datasets": "the dataset's own name",
    "post /api/v1/datasets/{name}/from-captured": "a filter: test_bound_publishing.py",
    "post /api/v1/datasets/{name}/restore": "a version of the dataset",
    "post /api/v1/datasets/{name}/versions": "a file of rows that a client sent",
    "put /api/v1/datasets/{name}/source": [
        {"kind": "captured"},
        {"kind": "captured", "model": NAME},
    ],
    "post /api/v1/evaluations": [{"model": NAME, "suite": "cases"}],
    "get /api/v1/evaluations/compare": ["?before={evaluation}&after={evaluation}"],
    "put /api/v1/judges/{name}": "a model elsewhere",
    "post /api/v1/keys": [{"name": "more", "allowed_models": ["others", NAME]}],
    "patch /api/v1/keys/{public_id}": "test_key_grants.py",
    "put /api/v1/limits": [{"model": NAME, "max_waiting": 1}],
    "get /api/v1/morning": [f"?adapter={NAME}"],
    "get /api/v1/requests": "a filter: test_lists_leave_the_others_out",
    "post /api/v1/service-accounts": "the account's own name",
    "post /api/v1/suites/{name}/versions": [
        {"from_requests": {"requests": ["{request}"], "checks": [{"kind": "exact"}]}}
    ],
    "patch /api/v1/tenant": "the tenant's name",
    "get /api/v1/training-runs": [f"?adapter={NAME}"],
    "post /api/v1/training-runs": [{"adapter": NAME, "dataset": "rows"}],
    "post /v1/batches": "a file of lines, which batches/test_validation.py checks by the key",
    "post /v1/chat/completions": [
        {"model": NAME, "messages": [{"role": "user", "content": "x"}]},
        {"model": f"ft:tiny:acme:{NAME}:1", "messages": [{"role": "user", "content": "x"}]},
        {"adapters": [{"model": NAME}], "messages": [{"role": "user", "content": "x"}]},
    ],
    "post /v1/completions": [{"model": NAME, "prompt": "x"}, {"model": ALIAS, "prompt": "x"}],
    "post /v1/detokenize": [{"model": NAME, "tokens": [1]}],
    "post /v1/feedback": [{"request_id": "{request}", "rating": "good"}],
    "post /v1/files": "the bytes that its client sends",
    "post /v1/fine_tuning/jobs": [
        {"model": f"{NAME}@1", "training_file": "file-1", "suffix": "others"},
        {"model": "others", "training_file": "file-1", "suffix": NAME},
    ],
    "post /v1/responses": [{"model": NAME, "input": "x"}],
    "post /v1/tokenize": [{"model": NAME, "prompt": "x"}],
}
#: Lists that show the model to a key that may name it.
LISTS = (
    "/api/v1/adapters",
    "/api/v1/aliases",
    "/api/v1/capture",
    "/api/v1/captured-requests",
    "/api/v1/evaluations",
    "/api/v1/limits",
    "/api/v1/morning",
    "/api/v1/requests",
    "/api/v1/training-runs",
    "/api/v1/usage",
    "/v1/batches",
    "/v1/files",
    "/v1/fine_tuning/jobs",
    "/v1/models",
    f"/v1/organization/usage/completions?start_time={time.time() - 86400:.0f}&group_by=model",
)


def bound_to(party: Party, *models: str) -> APIClient:
    """A client whose key has all scopes, and these models alone; none: all models."""
    client: APIClient = client_of(make(party, scopes=list(SCOPES), allowed_models=list(models)))
    return client


def kind_of(path: str, kinds: Any) -> str | None:
    return next((kind for kind in kinds if f"{path}/".startswith(f"{kind}/")), None)


def _ask(client: APIClient, method: str, path: str, body: Any = None) -> Any:
    return getattr(client, method)(path, {} if body is None else body, format="json")


def _is_like(named: str) -> str:
    """An id or a name of the same kind that nobody has."""
    if found := re.fullmatch(r"(.*?)([0-9a-f]{32})", named):
        return f"{found[1]}{uuid.uuid4().hex}"
    return str(uuid.uuid4()) if re.fullmatch(r"[0-9a-f-]{36}", named) else "nobodys"


def test_every_address_is_known_here() -> None:
    unknown = [
        f"{method} {path}"
        for method, path in OPERATIONS
        if "{" in path and not kind_of(path, [*OF_A_MODEL, *OF_NO_MODEL])
    ]
    assert unknown == [], "say in OF_A_MODEL or OF_NO_MODEL what these name"


@pytest.mark.parametrize("kind", OF_A_MODEL)
def test_an_address_of_another_model_answers_as_one_of_none(
    acme: Party, world: World, kind: str
) -> None:
    """The status, and the body but for the name, are those of what does not exist."""
    bound, named = bound_to(acme, "others"), world.ids[kind]
    walked = [(method, path) for method, path in OPERATIONS if kind_of(path, [kind])]
    assert walked
    parameter = kind[kind.index("{") :]
    for method, path in walked:
        body = PASSING.get(f"{method} {path}")
        url = path.replace("{number}", "1")
        answers = []
        for thing in (named, missing := _is_like(named)):
            answer = _ask(bound, method, f"{url.replace(parameter, thing)}?with=2", body)
            answers.append((answer.status_code, answer.content.decode().replace(thing, "it")))
        assert answers[0] == answers[1], (method, path, missing)
        assert answers[0][0] in (403, 404), (method, path, answers[0])
    with tenant_scope(acme.tenant.id):
        assert AdapterVersion.objects.filter(adapter__live_version__number=1).count() == 2


@pytest.mark.parametrize("kind", OF_A_MODEL)
def test_a_key_of_the_model_reads_it(acme: Party, world: World, kind: str) -> None:
    """Else the refusals would prove nothing."""
    client = bound_to(acme, NAME, ALIAS)
    for method, path in OPERATIONS:
        url = path.replace("{number}", "2").replace(kind[kind.index("{") :], world.ids[kind])
        if method == "get" and kind_of(path, [kind]) and not path.endswith(("/upload", "/content")):
            answer = client.get(f"{url}?with=1")
            assert answer.status_code == 200, (url, answer.content)


def test_every_field_that_may_name_a_model_is_known_here() -> None:
    unknown = []
    for method, path in OPERATIONS:
        operation = DOCUMENT["paths"][path][method]
        fields = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"}
        if method == "get" and {"after", "limit"} <= fields:
            fields -= {"after", "before"}  # of a page
        for content in operation.get("requestBody", {}).get("content", {}).values():
            fields |= set(_fields(content.get("schema", {})))
        if any(map(NAMING.match, fields)) and f"{method} {path}" not in BODIES:
            unknown.append(f"{method} {path}")
    assert unknown == [], "give in BODIES what names another model there, or say what it names"


def _fields(schema: Any) -> list[str]:
    if "$ref" in schema:
        return _fields(DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    parts = [part for word in ("allOf", "anyOf", "oneOf") for part in schema.get(word, ())]
    return [*schema.get("properties", {}), *(name for part in parts for name in _fields(part))]


ASKED = [
    (operation, body)
    for operation, bodies in BODIES.items()
    if not isinstance(bodies, str)
    for body in bodies
]


def test_a_body_that_names_another_model_is_refused(acme: Party, world: World) -> None:
    bound = bound_to(acme, "others")
    ids = {
        "{request}": world.ids["/api/v1/requests/{request_id}"],
        "{evaluation}": world.ids["/api/v1/evaluations/{evaluation_id}"],
    }

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(each) for key, each in value.items()}
        if isinstance(value, list):
            return [filled(each) for each in value]
        for placeholder, found in ids.items():
            value = value.replace(placeholder, found) if isinstance(value, str) else value
        return value

    for operation, body in ASKED:
        method, _, path = operation.partition(" ")
        url = path.replace("{name}", "new")
        if isinstance(body, str):
            answer = _ask(bound, method, url + filled(body))
        else:
            answer = _ask(bound, method, url, filled(body))
        assert answer.status_code in (403, 404), (operation, body, answer.content)
        assert "answer of" not in answer.content.decode(), operation


def test_lists_leave_the_others_out(acme: Party, world: World) -> None:
    own, bound = bound_to(acme, NAME, ALIAS), bound_to(acme, "others")
    for address in LISTS:
        assert NAME in own.get(address).content.decode(), address
    lists = {path for method, path in OPERATIONS if method == "get" and "{" not in path}
    lists -= {"/health", "/info"}  # of the platform
    for address in sorted(lists | set(LISTS)):
        answer = bound.get(address)
        assert answer.status_code in (200, 400, 403), (address, answer.content)
        if address != "/api/v1/keys":  # they tell their own lists
            assert NAME not in answer.content.decode(), address


def test_what_concerns_all_models_is_not_such_a_keys(acme: Party) -> None:
    bound = bound_to(acme, "others")
    for method, path in [
        ("get", "/api/v1/audit-events"),
        ("get", "/api/v1/webhooks"),
        ("put", "/api/v1/capture"),
        ("put", "/api/v1/request-log"),
    ]:
        error = _ask(bound, method, path).json()["error"]
        assert "the key has allowed_models" in error["message"], path
    assert len(OF_ALL_MODELS) == 3


def test_every_table_says_whether_its_rows_are_of_a_model() -> None:
    """`objects.allowed()` binds the first; views have no other way to them."""
    of_none = {
        *("AuditEvent", "BatchResult", "Budget", "CapturePolicy", "Case", "Dataset"),
        *("DatasetContent", "DatasetPull", "DatasetSource", "DatasetVersion", "DeadLetter"),
        *("DeletedVersion", "EventMail", "File", "Invite", "Judge", "LogPolicy", "MailChoice"),
        *("Membership", "OutboxEvent", "RefusalHour", "RequestContent", "ServiceAccount", "ApiKey"),
        *("Suite", "SuiteVersion", "TenantQuota", "Turn", "Upload", "UploadPart"),
        *("WebhookDelivery", "WebhookEndpoint", "IdempotencyRecord"),
    }
    tables = [each for each in apps.get_models() if issubclass(each, TenantModel)]
    assert {each.__name__ for each in tables if each.MODEL_FIELD is None} == of_none
    of_models = "|".join(each.__name__ for each in tables if each.MODEL_FIELD is not None)
    unbound = re.compile(rf"\b(?:{of_models})\.objects\.(?!allowed\(\))[^\n]*")
    found = [
        line
        for face in ("management", "gateway")
        for file in (CONTROLPLANE / face).rglob("*.py")
        for line in unbound.findall(file.read_text())
    ]
    assert found == []
