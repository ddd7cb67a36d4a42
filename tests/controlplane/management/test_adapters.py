"""/api/v1/adapters as seen by its owner, a colleague who only reads, and a stranger."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any

import pytest
from django.test import Client
from rest_framework.test import APIClient

from controlplane.adapters import services
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.tenancy import epochs
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.models import Tenant
from tests.controlplane.adapters.files import GOOD_CONFIG, GOOD_TENSORS, put
from tests.controlplane.conftest import Party, as_key, as_user, assert_error

STATED = {"adapter_config.json": len(GOOD_CONFIG), "adapter_model.safetensors": len(GOOD_TENSORS)}
VERSIONS = "/api/v1/adapters/invoices/versions"

pytestmark = pytest.mark.usefixtures("base_model")


def begin(client: APIClient, url: str = VERSIONS, **fields: Any) -> Any:
    return client.post(url, {"files": STATED, **fields}, format="json")


def test_upload_through_the_api(acme: Party, django_capture_on_commit_callbacks: Any) -> None:
    client = as_key(acme)
    answer = begin(client)
    assert answer.status_code == 201
    version = answer.json()
    assert (version["number"], version["status"]) == (1, "uploading")
    for file, data in (
        ("adapter_config.json", GOOD_CONFIG),
        ("adapter_model.safetensors", GOOD_TENSORS),
    ):
        upload = version["uploads"][file]
        assert upload["method"] == "PUT"
        assert upload["headers"] == {"Content-Length": str(len(data))}
        assert put(upload["url"], data) == 200
    with django_capture_on_commit_callbacks() as callbacks:
        done = client.post(f"{VERSIONS}/1/complete")
    queued = [call for call in callbacks if getattr(call, "func", None) is not epochs.move]
    assert (done.status_code, done.json()["status"], len(queued)) == (202, "uploaded", 1)
    assert client.get(f"{VERSIONS}/1").json()["status"] == "uploaded"
    assert client.get("/api/v1/adapters/invoices").json()["live_version"] is None


def test_complete_again_changes_nothing(acme: Party) -> None:
    client = as_key(acme)
    version = begin(client).json()
    put(version["uploads"]["adapter_config.json"]["url"], GOOD_CONFIG)
    put(version["uploads"]["adapter_model.safetensors"]["url"], GOOD_TENSORS)
    first = client.post(f"{VERSIONS}/1/complete")
    assert client.post(f"{VERSIONS}/1/complete").json() == first.json()


def test_complete_names_the_missing_file(acme: Party) -> None:
    client = as_key(acme)
    version = begin(client).json()
    assert_error(client.post(f"{VERSIONS}/1/complete"), 409, "adapter_config.json")
    put(version["uploads"]["adapter_config.json"]["url"], GOOD_CONFIG)
    answer = client.post(f"{VERSIONS}/1/complete")
    assert_error(answer, 409, "adapter_model.safetensors")
    assert answer["x-should-retry"] == "false"
    assert client.get(f"{VERSIONS}/1").json()["status"] == "uploading"


@pytest.mark.parametrize("change", [-1, 1])
def test_store_refuses_another_length_than_stated(acme: Party, change: int) -> None:
    version = begin(as_key(acme)).json()
    data = (GOOD_CONFIG + b" ")[: len(GOOD_CONFIG) + change]
    assert put(version["uploads"]["adapter_config.json"]["url"], data) == 403


def test_store_refuses_another_key_than_signed(acme: Party) -> None:
    url = begin(as_key(acme)).json()["uploads"]["adapter_config.json"]["url"]
    parts = urllib.parse.urlsplit(url)
    elsewhere = parts._replace(path=parts.path.replace("/u/", "/adapters/")).geturl()
    assert put(elsewhere, GOOD_CONFIG) == 403


def test_numbers_count_up_per_adapter(acme: Party) -> None:
    client = as_key(acme)
    numbers = [begin(client).json()["number"] for _ in range(3)]
    other = begin(client, "/api/v1/adapters/other/versions").json()["number"]
    assert (numbers, other) == ([1, 2, 3], 1)


def test_versions_without_files_are_bounded(
    acme: Party, globex: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "MAX_UNFINISHED", 2)
    answers = [begin(as_key(acme)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 201, 429]
    assert assert_error(answers[2], 429)["code"] == "too_many_uploads"
    assert "Retry-After" in answers[2]
    assert begin(as_key(globex)).status_code == 201


BAD_FILES = {
    "nothing": ({}, "files.adapter_config.json"),
    "one only": ({"adapter_config.json": 10}, "files.adapter_model.safetensors"),
    "empty": ({**STATED, "adapter_config.json": 0}, "files.adapter_config.json"),
    "negative": ({**STATED, "adapter_config.json": -1}, "files.adapter_config.json"),
    "config too long": ({**STATED, "adapter_config.json": 65537}, "files.adapter_config.json"),
    "tensors too long": (
        {**STATED, "adapter_model.safetensors": 2 * 1024**3 + 1},
        "files.adapter_model.safetensors",
    ),
    "pickle": ({**STATED, "adapter_model.bin": 10}, "files"),
    "text": ({**STATED, "adapter_config.json": "many"}, "files.adapter_config.json"),
    "fraction": ({**STATED, "adapter_config.json": 1.5}, "files.adapter_config.json"),
    "true": ({**STATED, "adapter_config.json": True}, "files.adapter_config.json"),
    "list": ([1], "files"),
    "null": (None, "files"),
    "huge number": ({**STATED, "adapter_config.json": 10**999}, "files.adapter_config.json"),
}


@pytest.mark.parametrize(("stated", "param"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_named(acme: Party, stated: Any, param: str) -> None:
    answer = as_key(acme).post(VERSIONS, {"files": stated}, format="json")
    assert_error(answer, 400, param)
    with tenant_scope(acme.tenant.id):
        assert not Adapter.objects.exists()


@pytest.mark.parametrize(
    ("name", "status"), [("Invoices", 400), ("a%00b", 400), ("x" * 64, 400), ("tiny", 409)]
)
def test_bad_name_is_named(acme: Party, name: str, status: int) -> None:
    assert_error(begin(as_key(acme), f"/api/v1/adapters/{name}/versions"), status, "name")


def test_unknown_base_model_is_named(acme: Party) -> None:
    error = assert_error(begin(as_key(acme), base_model="gpt-9"), 400, "base_model")
    assert "tiny" in error["message"]


def test_base_model_is_asked_for_when_there_are_two(acme: Party, base_model: BaseModel) -> None:
    BaseModel.objects.create(
        name="other", revision="1" * 64, config=base_model.config, context_length=128
    )
    client = as_key(acme)
    assert_error(begin(client), 400, "base_model")
    assert begin(client, base_model="other").status_code == 201
    assert begin(client).json()["number"] == 2
    assert_error(begin(client, base_model="tiny"), 409, "base_model")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", "files"),
        (b"[]", None),
        (b'{"files": {}, "flies": 1}', "flies"),
        (b"[" * 100_000, None),
        (b'{"files": NaN}', "files"),
        (b"\xff", None),
    ],
    ids=["truncated", "empty", "list", "unknown field", "deep", "nan", "not utf-8"],
)
def test_malformed_bodies(acme: Party, body: bytes, param: str | None) -> None:
    answer = as_key(acme).post(VERSIONS, body, content_type="application/json")
    assert_error(answer, 400, param)


def test_body_is_bounded(acme: Party) -> None:
    body = b'{"files": "' + b"x" * 300_000 + b'"}'
    answer = as_key(acme).post(VERSIONS, body, content_type="application/json")
    assert_error(answer, 413)


def test_other_content_types_and_methods(acme: Party) -> None:
    client = as_key(acme)
    assert_error(client.post(VERSIONS, b"<a/>", content_type="text/xml"), 415)
    assert_error(client.delete(VERSIONS), 405)


def test_pages(acme: Party) -> None:
    client = as_key(acme)
    for name in ("one", "two", "three"):
        begin(client, f"/api/v1/adapters/{name}/versions")
    first = client.get("/api/v1/adapters?limit=2").json()
    assert ([row["name"] for row in first["data"]], first["has_more"]) == (["three", "two"], True)
    second = client.get(f"/api/v1/adapters?limit=2&after={first['last_id']}").json()
    assert ([row["name"] for row in second["data"]], second["has_more"]) == (["one"], False)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("after=x", "after")],
)
def test_bad_page_is_named(acme: Party, query: str, param: str) -> None:
    assert_error(as_key(acme).get(f"/api/v1/adapters?{query}"), 400, param)


class TestWhoMay:
    """Each endpoint, as the owner, a viewer of the same tenant, a stranger, and nobody."""

    READS = ("/api/v1/adapters/invoices", VERSIONS, f"{VERSIONS}/1")
    LISTS = ("/api/v1/adapters", "/api/v1/base-models", "/api/v1/keys")
    WRITES = ("/api/v1/adapters", VERSIONS, f"{VERSIONS}/1/complete")

    @pytest.fixture(autouse=True)
    def _adapter(self, acme: Party, base_model: BaseModel) -> None:
        begin(as_key(acme))

    @pytest.mark.parametrize("url", READS + LISTS)
    def test_owner_viewer_and_key_read(self, acme: Party, url: str) -> None:
        for client in (as_user(acme.owner), as_user(acme.viewer), as_key(acme)):
            assert client.get(url).status_code == 200

    @pytest.mark.parametrize("url", WRITES)
    def test_viewer_cannot_write(self, acme: Party, url: str) -> None:
        assert_error(as_user(acme.viewer).post(url, {}, format="json"), 403)

    @pytest.mark.parametrize("url", READS)
    def test_stranger_sees_what_is_missing(self, globex: Party, url: str) -> None:
        stranger = as_key(globex)
        theirs = stranger.get(url)
        with all_tenants(reason="test"):
            Tenant.objects.filter(slug="acme").delete()
        missing = stranger.get(url)
        assert theirs.status_code == missing.status_code == 404
        assert theirs.content == missing.content
        ids = [answer.headers.pop("X-Request-Id") for answer in (theirs, missing)]
        assert len(set(ids)) == 2
        assert theirs.headers == missing.headers

    def test_stranger_cannot_complete(self, globex: Party) -> None:
        theirs = as_key(globex).post(f"{VERSIONS}/1/complete")
        missing = as_key(globex).post(f"{VERSIONS}/2/complete")
        assert (theirs.status_code, theirs.content) == (404, missing.content)

    @pytest.mark.parametrize("url", LISTS)
    def test_stranger_lists_their_own(self, acme: Party, globex: Party, url: str) -> None:
        listed = json.dumps(as_user(globex.owner).get(url).json())
        assert "invoices" not in listed
        assert acme.api_key.public_id not in listed

    def test_stranger_may_use_the_same_name(self, globex: Party) -> None:
        assert begin(as_key(globex)).json()["number"] == 1

    @pytest.mark.parametrize("url", READS + LISTS)
    def test_nobody_is_asked_who_they_are(self, url: str) -> None:
        answer = APIClient().get(url)
        assert assert_error(answer, 401)["code"] == "invalid_api_key"
        assert answer["WWW-Authenticate"] == "Bearer"

    def test_session_needs_a_csrf_token_to_write(self, acme: Party) -> None:
        client = Client(enforce_csrf_checks=True)
        client.force_login(acme.owner)
        assert client.get(VERSIONS).status_code == 200
        body = json.dumps({"files": STATED})
        refused = client.post(VERSIONS, body, content_type="application/json")
        assert_error(refused, 403)
        client.cookies["csrftoken"] = "a" * 32
        accepted = client.post(
            VERSIONS, body, content_type="application/json", headers={"X-CSRFToken": "a" * 32}
        )
        assert accepted.status_code == 201

    def test_bad_key_is_not_replaced_by_a_session(self, acme: Party) -> None:
        client = as_user(acme.owner)
        client.credentials(HTTP_AUTHORIZATION="Bearer lk_live_nonsense")
        assert_error(client.get(VERSIONS), 401)


def test_creator_is_recorded(acme: Party) -> None:
    begin(as_user(acme.owner))
    with tenant_scope(acme.tenant.id):
        assert AdapterVersion.objects.get().created_by == acme.owner


def test_adapter_create(acme: Party) -> None:
    client = as_key(acme)
    body = {"name": "support", "base_model": "tiny", "description": "Voice of support"}
    answer = client.post("/api/v1/adapters", body, format="json")
    assert (answer.status_code, answer.json()["base_model"]) == (201, "tiny")
    assert_error(client.post("/api/v1/adapters", body, format="json"), 409, "name")
