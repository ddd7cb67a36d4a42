"""Uploads by parts: cut off, paused, resumed after a reload, and without the browser's SHA-256."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Request, Route, StorageState, expect

from tests.browser.conftest import Site, window
from tests.browser.test_console import READY_TIMEOUT_MS
from tests.controlplane.adapters.wide import CONFIG_BYTES, wide_base, wide_tensors

pytestmark = pytest.mark.browser

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
LAYERS = 4
#: What the browser itself says of a connection that broke.
BROKEN = "ERR_INTERNET_DISCONNECTED|ERR_FAILED"
ADD_BASE = """
import json
from controlplane.adapters.models import BaseModel
BaseModel.objects.get_or_create(name="wide", defaults=dict(
    revision="0" * 64, config=json.loads('{config}'), context_length=128, max_rank=256))
"""


@pytest.fixture
def opened(browser: Browser, site: Site, owners_cookies: StorageState) -> Iterator[Page]:
    with window(browser, site.base_url, but=BROKEN, state=owners_cookies) as page:
        yield page


@pytest.fixture(scope="module")
def wide_dir(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of 28 MiB: four parts."""
    code = ADD_BASE.replace("{config}", json.dumps(wide_base(LAYERS)))
    site.manage("shell", "--no-imports", "-c", code)
    folder = tmp_path_factory.mktemp("wide")
    (folder / CONFIG).write_bytes(CONFIG_BYTES)
    (folder / TENSORS).write_bytes(wide_tensors(LAYERS))
    return folder


def choose(page: Page, folder: Path) -> None:
    for field, file in (("config", CONFIG), ("tensors", TENSORS)):
        page.locator(f"[name={field}]").set_input_files(folder / file)


def begin(page: Page, name: str, folder: Path, base_model: str | None = None) -> None:
    page.goto("/console/upload")
    page.get_by_label("Adapter name").fill(name)
    if base_model:
        page.get_by_label("Base model", exact=True).select_option(base_model)
    choose(page, folder)
    page.get_by_role("button", name="Upload").click()


def wait_until(page: Page, condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        page.wait_for_timeout(100)
    raise AssertionError("it did not happen")


def expect_ready(page: Page, name: str) -> None:
    page.wait_for_url(f"**/adapters/{name}/versions/1", timeout=READY_TIMEOUT_MS)
    ready = page.get_by_role("heading", name="Ready and live")
    expect(ready).to_be_visible(timeout=READY_TIMEOUT_MS)


def test_an_upload_that_is_cut_goes_on_after_a_reload(
    opened: Page, wide_dir: Path, tmp_path: Path
) -> None:
    network = opened.context.new_cdp_session(opened)
    network.send("Network.enable")
    held: list[Route] = []

    def hold_last_parts(route: Route) -> None:
        """The last two of four parts stay on their way."""
        if route.request.method == "PUT" and re.search("partNumber=[34]", route.request.url):
            held.append(route)
        else:
            route.continue_()

    def switch(*, offline: bool) -> None:
        rates = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        network.send("Network.emulateNetworkConditions", {"offline": offline, **rates})

    opened.route("**/*", hold_last_parts)
    begin(opened, "slow-cut", wide_dir, "wide")
    status = opened.locator("[data-status]")
    expect(status).to_contain_text("16.8 MB of 29.4 MB", timeout=READY_TIMEOUT_MS)
    opened.get_by_role("button", name="Pause").click()
    expect(status).to_contain_text("Paused. Uploading")
    held.clear()
    opened.get_by_role("button", name="Continue").click()
    expect(status).to_contain_text("Uploading: 16.8 MB of 29.4 MB", timeout=READY_TIMEOUT_MS)
    wait_until(opened, lambda: len(held) == 2)
    switch(offline=True)
    for route in held:
        route.abort("internetdisconnected")  # one that goes on may arrive: it began online
    expect(status).to_contain_text("The connection broke at 16.8 MB", timeout=READY_TIMEOUT_MS)
    switch(offline=False)

    parts: list[Request] = []
    opened.on("request", lambda sent: parts.append(sent) if "partNumber" in sent.url else None)
    opened.reload()  # the parts that it sent again by itself are still held
    opened.unroute("**/*")
    note = opened.locator("[data-unfinished]")
    expect(note).to_contain_text("slow-cut is not finished: 16.8 MB of 29.4 MB arrived")
    expect(opened.get_by_label("Adapter name")).to_be_disabled()

    other = tmp_path / "other"
    other.mkdir()
    (other / CONFIG).write_bytes(CONFIG_BYTES)
    (other / TENSORS).write_bytes(bytes(len(wide_tensors(LAYERS))))
    choose(opened, other)
    opened.get_by_role("button", name="Continue").click()
    expect(opened.get_by_role("alert").first).to_contain_text("is another file than before")
    assert parts == []
    (other / TENSORS).write_bytes(b"short")
    choose(opened, other)
    opened.get_by_role("button", name="Continue").click()
    expect(opened.locator('[data-errors="tensors"]')).to_contain_text("began with another file")

    choose(opened, wide_dir)
    opened.get_by_role("button", name="Continue").click()
    expect_ready(opened, "slow-cut")
    sent = [request for request in parts if request.method == "PUT"]
    assert len(sent) == 2, "what had arrived is not sent again"
    opened.goto("/console/upload")
    expect(note).to_be_hidden()


def test_a_broken_connection_is_told_and_the_upload_goes_on_by_itself(
    opened: Page, adapter_dir: Path
) -> None:
    opened.route(
        "**/*",
        lambda route: route.abort() if route.request.method == "PUT" else route.continue_(),
    )
    begin(opened, "slow-broken", adapter_dir)
    expect(opened.get_by_text("The connection broke at")).to_be_visible()
    opened.unroute("**/*")
    expect_ready(opened, "slow-broken")


def test_an_unfinished_upload_is_discarded(opened: Page, adapter_dir: Path) -> None:
    opened.route(
        "**/*",
        lambda route: route.abort() if route.request.method == "PUT" else route.continue_(),
    )
    begin(opened, "slow-dropped", adapter_dir)
    expect(opened.get_by_text("The connection broke at")).to_be_visible()
    opened.reload()
    opened.get_by_role("button", name="Discard it").click()
    expect(opened.get_by_label("Adapter name")).to_be_enabled()
    opened.goto("/console/adapters/slow-dropped")
    expect(opened.get_by_role("link", name="Version 1")).to_have_count(0)


def test_a_page_without_the_browsers_sha256_uploads_too(opened: Page, adapter_dir: Path) -> None:
    """As on an address of http that is not this machine's."""
    opened.goto("/console/upload")
    digests = opened.evaluate(
        """async () => {
            Object.defineProperty(crypto, "subtle", { value: undefined });
            const { sha256 } = await import("/static/console/sha256.js");
            const lengths = [...Array(200).keys(), 5000, 1 << 20];
            return Promise.all(lengths.map((n) => sha256(new Uint8Array(n).fill(n).buffer)));
        }"""
    )
    lengths = [*range(200), 5000, 1 << 20]
    assert digests == [hashlib.sha256(bytes([n % 256]) * n).hexdigest() for n in lengths]
    opened.add_init_script('Object.defineProperty(crypto, "subtle", { value: undefined });')
    begin(opened, "slow-page", adapter_dir)
    expect_ready(opened, "slow-page")
