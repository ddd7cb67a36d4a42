"""The calls that the upload form's script makes, against the real object store."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from controlplane.adapters import ingest
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.console.views.adapters.adapters import version_steps
from controlplane.tenancy.scoping import tenant_scope
from tests.controlplane.adapters import files
from tests.controlplane.adapters.test_ingest import put
from tests.controlplane.conftest import Party
from tests.controlplane.console.conftest import Belongings, browser_of

CONFIG, TENSORS = files.config_bytes(), files.pack(files.tensors())
FORM = {
    "name": "support-voice",
    "base_model": "tiny",
    "config": len(CONFIG),
    "tensors": len(TENSORS),
}
JSON = "application/json"


def start(party: Party, **fields: Any) -> Any:
    return browser_of(party.owner).post("/console/upload/start", FORM | fields, content_type=JSON)


def sign(party: Party, started: Any, field: str, data: bytes, number: Any = 1) -> Any:
    """The answer to the script when it asks for a part's address."""
    body = {"file": field, "number": number, "sha256": hashlib.sha256(data).hexdigest()}
    return browser_of(party.owner).post(
        started["parts_url"], body, content_type=JSON, headers={"accept": JSON}
    )


def upload(party: Party, config: bytes, tensors: bytes, **fields: Any) -> str:
    """Send both files as the script does and check them; the version's page."""
    started = start(party, config=len(config), tensors=len(tensors), **fields).json()
    browser = browser_of(party.owner)
    for field, data in (("config", config), ("tensors", tensors)):
        signed = sign(party, started, field, data).json()
        assert put(signed["url"], data, signed["headers"]) == 200
    state = browser.get(started["state_url"]).json()
    parts = {field: file["parts"] for field, file in state["files"].items()}
    assert [part["is_uploaded"] for part in parts["tensors"]] == [True]
    assert state["status"] == "uploading"
    completed = browser.post(started["complete_url"], {}, content_type=JSON)
    assert completed.status_code == 200
    with tenant_scope(party.tenant.id):
        ingest.version_ingest(AdapterVersion.objects.order_by("-created_at")[0].pk)
    return str(started["version_url"])


def test_upload_becomes_ready(acme: Party, base_model: BaseModel) -> None:
    url = upload(acme, CONFIG, TENSORS)
    assert url == "/console/adapters/support-voice/versions/1"
    page = browser_of(acme.owner).get(url).content.decode()
    assert "Ready and live" in page
    assert "hx-trigger" not in page


def test_rejection_says_why(acme: Party, base_model: BaseModel) -> None:
    page = browser_of(acme.owner).get(upload(acme, CONFIG, b"\x80\x04" + TENSORS)).content.decode()
    assert "This version was rejected" in page
    assert "adapter_model.safetensors" in page


def test_another_base_models_name_is_accepted_by_a_box(acme: Party, base_model: BaseModel) -> None:
    BaseModel.objects.update(known_names=["org/tiny"])
    config = files.config_bytes(base_model_name_or_path="lab/our-copy")
    browser = browser_of(acme.owner)
    page = browser.get(upload(acme, config, TENSORS)).content.decode()
    assert "This version was rejected" in page
    box = "Accept another name of the base model"
    assert f"console: the box &quot;{box}&quot;" in page
    form = browser.get("/console/upload").content.decode()
    assert box in form and 'name="accept_base_mismatch"' in form
    page = browser.get(upload(acme, config, TENSORS, accept_base_mismatch=True)).content.decode()
    assert "Ready and live" in page


def test_waiting_version_asks_again(acme: Party, base_model: BaseModel) -> None:
    url = start(acme).json()["version_url"]
    page = browser_of(acme.owner).get(url).content.decode()
    assert f'hx-get="{url}/status" hx-trigger="every 3s"' in page


def test_reason_is_text_not_markup(acme: Party, belongings: Belongings) -> None:
    page = browser_of(acme.owner).get("/console/adapters/invoices/versions/2").content
    assert b"DoRA &lt;is&gt; not supported." in page


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "No Slug"}, "name"),
        ({"name": "tiny"}, "name"),
        ({"base_model": "no-such"}, "base_model"),
        ({"config": 0}, "config"),
        ({"config": 10**9}, "config"),
        ({"tensors": 10**12}, "tensors"),
        ({"tensors": "many"}, "tensors"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_of_its_field(
    fields: dict[str, Any], field: str, acme: Party, base_model: BaseModel
) -> None:
    answer = start(acme, **fields)
    assert answer.status_code == 422
    assert list(answer.json()["errors"]) == [field]


@pytest.mark.parametrize("body", ["[]", "{", "[" * 9000], ids=["list", "cut", "deep"])
def test_broken_body_is_refused(body: str, acme: Party, base_model: BaseModel) -> None:
    answer = browser_of(acme.owner).post(
        "/console/upload/start", body, content_type=JSON, headers={"accept": JSON}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_completing_before_the_files_arrived_is_refused(acme: Party, base_model: BaseModel) -> None:
    started = start(acme).json()
    answer = browser_of(acme.owner).post(
        started["complete_url"], {}, content_type=JSON, headers={"accept": JSON}
    )
    assert answer.status_code == 409
    assert "is not uploaded" in answer.json()["error"]["message"]


def test_upload_names_the_version_of_the_caller_alone(
    acme: Party, globex: Party, belongings: Belongings
) -> None:
    started = start(globex, name="invoices").json()
    assert started["version_url"].endswith("/invoices/versions/1")
    with tenant_scope(acme.tenant.id):
        assert belongings.adapter.versions.count() == 2


@pytest.mark.parametrize("number", [2, 0, None, "x", [1], {"1": 2}], ids=str)
def test_parts_that_do_not_exist_are_refused(
    number: Any, acme: Party, base_model: BaseModel
) -> None:
    started = start(acme).json()
    assert sign(acme, started, "config", CONFIG, number).status_code == 400
    assert sign(acme, started, "other", CONFIG).status_code == 404
    assert sign(acme, started, "config", CONFIG).status_code == 200
    assert sign(acme, started, "config", TENSORS).status_code == 409


def test_an_upload_is_given_up(acme: Party, globex: Party, base_model: BaseModel) -> None:
    started = start(acme).json()
    for url in ("abort_url", "complete_url", "parts_url"):
        assert browser_of(globex.owner).post(started[url]).status_code == 404
    assert browser_of(globex.owner).get(started["state_url"]).status_code == 404
    assert browser_of(acme.owner).post(started["abort_url"]).status_code == 200
    assert browser_of(acme.owner).get(started["version_url"]).status_code == 404
    assert browser_of(acme.owner).post(started["abort_url"]).status_code == 404


def test_new_version_of_an_adapter_is_filled_in(acme: Party, belongings: Belongings) -> None:
    page = browser_of(acme.owner).get("/console/upload?adapter=invoices").content
    assert b'value="invoices"' in page


@pytest.mark.parametrize(
    ("status", "states"),
    [
        ("uploading", ["now", "", "", ""]),
        ("validating", ["done", "done", "now", ""]),
        ("ready", ["done", "done", "done", "done"]),
        ("rejected", ["done", "done", "done", "failed"]),
    ],
)
def test_steps_show_how_far_it_is(status: str, states: list[str]) -> None:
    assert [step["state"] for step in version_steps(status)] == states
