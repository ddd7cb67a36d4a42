"""A tenant's owner at work in the console, in a real browser against real servers."""

from __future__ import annotations

import json
import re
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from controlplane.tenants.keys import KEY_REGEX
from tests.browser.conftest import Site

pytestmark = pytest.mark.browser

#: Ingesting on a machine that is busy with other things.
READY_TIMEOUT_MS = 60_000


def upload(page: Page, name: str, folder: Path) -> None:
    page.get_by_role("link", name="Adapters", exact=True).click()
    page.get_by_role("link", name="Upload an adapter").click()
    page.get_by_label("Adapter name").fill(name)
    page.get_by_label("adapter_config.json").set_input_files(folder / "adapter_config.json")
    page.get_by_label("adapter_model.safetensors").set_input_files(
        folder / "adapter_model.safetensors"
    )
    page.get_by_role("button", name="Upload").click()
    page.wait_for_url(f"**/adapters/{name}/versions/1", timeout=READY_TIMEOUT_MS)


def test_uploaded_adapter_becomes_ready(page: Page, adapter_dir: Path) -> None:
    upload(page, "invoices", adapter_dir)
    expect(page.get_by_role("heading", name="Ready and live")).to_be_visible(
        timeout=READY_TIMEOUT_MS
    )
    page.get_by_role("link", name="Overview").click()
    row = page.get_by_role("row").filter(has_text="invoices").first
    expect(row).to_contain_text("live")
    expect(page.locator("#curl")).to_contain_text('"model": "invoices"')


def test_bad_adapter_shows_the_reason(page: Page, adapter_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter_dir, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "r": config["r"] + 1}))
    upload(page, "wrong-rank", folder)
    expect(page.get_by_role("heading", name="Rejected")).to_be_visible(timeout=READY_TIMEOUT_MS)
    expect(page.get_by_text("This version was rejected")).to_be_visible()
    expect(page.locator(".reasons li").first).to_contain_text("rank")


def test_form_says_what_is_missing_beside_the_field(page: Page) -> None:
    page.goto("/console/upload")
    page.get_by_label("Adapter name").fill("Not A Slug")
    page.get_by_role("button", name="Upload").click()
    expect(page.locator('[data-errors="config"]')).to_contain_text("adapter_config.json")
    expect(page.locator('[data-errors="tensors"]')).to_contain_text("adapter_model.safetensors")


def test_dropped_files_find_their_fields(page: Page) -> None:
    page.goto("/console/upload")
    files = page.evaluate_handle(
        """() => {
            const transfer = new DataTransfer();
            for (const name of ["README.md", "adapter_model.safetensors", "adapter_config.json"])
                transfer.items.add(new File(["x"], name));
            return transfer;
        }"""
    )
    page.dispatch_event("[data-drop]", "drop", {"dataTransfer": files})
    for field, name in (
        ("config", "adapter_config.json"),
        ("tensors", "adapter_model.safetensors"),
    ):
        chosen = f'[...document.querySelector("[name={field}]").files].map(file => file.name)'
        assert page.evaluate(chosen) == [name]


def test_failed_action_is_told(page: Page) -> None:
    window = page.context.new_page()
    window.goto("/console/keys")
    window.route("**/keys/new", lambda route: route.fulfill(status=500, body="no"))
    window.get_by_label("Name").fill("never made")
    window.get_by_role("button", name="Create key").click()
    expect(window.get_by_role("alert")).to_contain_text("the console answered 500")


def test_the_focus_stays_where_the_work_is(page: Page) -> None:
    page.goto("/console/audit")
    page.get_by_role("button", name="Verify the chain").press("Enter")
    expect(page.get_by_role("heading", name="The chain is intact")).to_be_visible()
    expect(page.get_by_role("button", name="Verify the chain")).to_be_focused()
    page.goto("/console/members")
    page.get_by_label("E-mail address").fill("owner@acme.example")
    page.get_by_role("button", name="Invite").press("Enter")
    expect(page.get_by_label("E-mail address")).to_be_focused()


def api_status(site: Site, key: str) -> int:
    """How the API answers to a key."""
    request = urllib.request.Request(
        f"{site.base_url}/v1/models", headers={"Authorization": f"Bearer {key}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_key_is_shown_once_and_revoked(page: Page, site: Site) -> None:
    page.get_by_role("link", name="API keys").click()
    page.get_by_label("Name").fill("browser test")
    page.get_by_role("button", name="Create key").click()
    shown = page.locator("#new-key")
    expect(shown).to_have_text(re.compile(KEY_REGEX.replace(r"\b", "")))
    expect(page.get_by_role("button", name="Copy")).to_be_focused()
    key = shown.inner_text()
    assert api_status(site, key) == 200

    page.reload()
    expect(page.get_by_role("row").filter(has_text="browser test")).to_have_count(1)
    assert key not in page.content()

    page.get_by_role("link", name="Revoke browser test").click()
    page.get_by_role("button", name="Revoke the key").click()
    row = page.get_by_role("row").filter(has_text="browser test")
    expect(row).to_contain_text("revoked")
    assert api_status(site, key) == 401


def test_narrow_pages_do_not_scroll_sideways(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    for path in ("/console/", "/console/adapters", "/console/keys", "/console/training"):
        page.goto(path)
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overflow) <= 0, path
