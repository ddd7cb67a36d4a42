"""The calls that the upload form's script makes, against the real object store."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.adapters import ingest
from controlplane.adapters.models import AdapterVersion, BaseModel
from controlplane.console.views.adapters import version_steps
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


def upload(party: Party, config: bytes, tensors: bytes) -> str:
    """Send both files as the script does and check them; the version's page."""
    started = start(party, config=len(config), tensors=len(tensors)).json()
    assert put(started["urls"]["config"], config) == 200
    assert put(started["urls"]["tensors"], tensors) == 200
    completed = browser_of(party.owner).post(started["complete_url"], {}, content_type=JSON)
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
