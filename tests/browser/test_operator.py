"""The operator's pages in a browser: drain, requeue, release, and who is kept out."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, StorageState, expect

from demo.processes import ChildProcess, Command
from tests.browser.conftest import PASSWORD, ROOT, Site, sign_in, window
from tests.browser.test_sign_in import confirm_password, totp
from tests.browser.walk import RAW_FLOAT, UUID, faults_of, operator_pages
from tests.fakes import FAKE_NAME, write_fake_base

pytestmark = pytest.mark.browser

OPERATOR = "operator@example.com"
DIGEST = "ab" * 32
SEED = f"""
import time
from django.conf import settings
from contract.messages.protocol import GenerateJob
from contract.queue import fair_queue
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel
from controlplane.infra.redis_client import redis_client
from controlplane.queue.models import DeadLetter
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.models import Tenant

acme = Tenant.objects.get(slug="acme")
with tenant_scope(acme.id):
    adapter = Adapter.objects.create(name="poison", base_model=BaseModel.objects.get())
    version = AdapterVersion.objects.create(
        adapter=adapter, number=1, digest="{DIGEST}", status="ready"
    )
    for number in range(3):
        job = GenerateJob(
            request_id=f"req_dead{{number}}", tenant_id=str(acme.id), api_key_id="", gateway_id="",
            model="poison", base_model=adapter.base_model.name, text="a planted secret",
        )
        DeadLetter.objects.create(
            request_id=job.request_id, model="poison", adapter_version_id=version.pk,
            worker_id="gpu-3", reason="given up", job=job.to_dict(),
        )
with redis_client() as client:
    client.hset(fair_queue.quarantine_key(settings.POOL), "{DIGEST}", int(time.time()))
"""
PAGES = ("", "workers/", "queues/", "dead-letters/", "quarantine/", "tenants/tenant/")


@pytest.fixture(scope="module")
def operators_cookies(browser: Browser, site: Site) -> StorageState:
    """Of an operator who has set up a second factor."""
    site.manage("operator_create", f"--email={OPERATOR}", "--password-stdin", text=f"{PASSWORD}\n")
    site.manage("shell", "-v0", "-c", SEED)
    with window(browser, site.base_url) as opened:
        sign_in(opened, OPERATOR)
        opened.goto("/admin/")
        expect(opened).to_have_url(re.compile("/console/security"))
        opened.goto("/console/account/2fa/totp/activate/")
        confirm_password(opened)
        secret = opened.get_by_label("Authenticator secret").input_value()
        opened.get_by_label("Authenticator code").fill(totp(secret))
        opened.get_by_role("button", name="Activate").click()
        opened.get_by_label("Unused codes").wait_for()
        return opened.context.storage_state()


@pytest.fixture
def operator(browser: Browser, site: Site, operators_cookies: StorageState) -> Iterator[Page]:
    with window(browser, site.base_url, state=operators_cookies) as opened:
        yield opened


@pytest.fixture(scope="module")
def worker(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildProcess]:
    """A real worker with an echoing engine."""
    folder = tmp_path_factory.mktemp("worker")
    env = {
        **site.env,
        "LORIKEET_WORKER_ID": "gpu-1",
        "LORIKEET_ADAPTER_DIR": str(folder / "adapters"),
        "LORIKEET_BASE_MODEL": str(write_fake_base(folder / "base")),
        "LORIKEET_DEVICE": "cpu",
    }
    process = ChildProcess(
        "worker",
        Command(
            argv=[sys.executable, "-m", "tests.fake_worker", "0", "0", "16"], env=env, cwd=ROOT
        ),
        log=Path(folder / "worker.log"),
        pid_file=Path(folder / "worker.json"),
    )
    process.start()
    yield process
    process.stop()


def test_the_pages_open_on_a_phone_and_in_the_dark(operator: Page) -> None:
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    operator.emulate_media(color_scheme="dark")
    for width in (360, 1280):
        operator.set_viewport_size({"width": width, "height": 800})
        for path in PAGES:
            operator.goto(f"/admin/{path}")
            expect(operator.locator("h1").first).to_be_attached()
            assert operator.evaluate(overflow) <= 0, (width, path)


def test_a_worker_is_drained_and_the_page_sees_it(operator: Page, worker: ChildProcess) -> None:
    operator.goto("/admin/workers/")
    row = operator.get_by_role("row").filter(has_text="gpu-1")
    # Without a reload: the page asks for the pool again and again.
    # Beside other tests, a slow machine takes most of a minute to start the worker.
    expect(row).to_contain_text("ready", timeout=120_000)
    expect(operator.get_by_role("heading", name=FAKE_NAME)).to_be_visible()
    operator.get_by_role("link", name="Drain gpu-1").click()
    expect(operator.get_by_text("Other workers of this base model that are ready")).to_be_visible()
    operator.get_by_role("button", name="Drain it").dblclick()
    expect(
        operator.get_by_text(re.compile("gpu-1 (was told to drain|is draining)"))
    ).to_be_visible()
    operator.mouse.move(0, 0)
    expect(operator.get_by_role("row").filter(has_text="gpu-1")).to_have_count(0, timeout=30_000)
    give_up_at = time.monotonic() + 30
    while worker.is_running() and time.monotonic() < give_up_at:
        time.sleep(0.1)
    assert worker.returncode == 0


def test_dead_letters_are_requeued_and_discarded(
    browser: Browser, site: Site, operators_cookies: StorageState
) -> None:
    context = browser.new_context(
        base_url=site.base_url, storage_state=operators_cookies, java_script_enabled=False
    )
    page = context.new_page()
    page.goto("/admin/")
    page.get_by_role("link", name="Dead letters", exact=True).last.click()
    assert "a planted secret" not in page.content()
    page.get_by_role("link", name="Requeue req_dead0").click()
    assert "a planted secret" not in page.content()
    page.get_by_role("button", name="Requeue").click()
    expect(page.get_by_text(re.compile("req_dead0 is requeued as req_"))).to_be_visible()
    for name in ("req_dead1", "req_dead2"):
        page.get_by_label(f"Choose {name}").check()
    page.get_by_role("button", name="Discard chosen").click()
    expect(page.get_by_text("these 2 dead letters")).to_be_visible()
    page.get_by_role("button", name="Discard").click()
    expect(page.get_by_text("req_dead1 is discarded.")).to_be_visible()
    expect(page.get_by_label("Choose req_dead2")).to_have_count(0)
    expect(page.get_by_role("row").filter(has_text="req_dead0")).to_contain_text("has not ended")
    context.close()


def test_an_adapter_is_released(operator: Page) -> None:
    operator.goto("/admin/quarantine/")
    expect(operator.get_by_role("link", name="acme/poison@1")).to_be_visible()
    operator.get_by_role("link", name=f"Release {DIGEST[:12]}").click()
    operator.get_by_role("button", name="Release it").click()
    expect(operator.get_by_text("is served again")).to_be_visible()
    expect(operator.get_by_text("No adapter is quarantined")).to_be_visible()


@pytest.mark.timeout(1200)
def test_no_page_of_the_operator_has_a_fault(
    operator: Page, site: Site, walked_pages: list[str]
) -> None:
    faults: list[str] = []
    for path in operator_pages(operator, site.base_url):
        faults += faults_of(operator)
        text = operator.locator("body").inner_text()
        faults += [f"{path}: raw {number}" for number in RAW_FLOAT.findall(text)]
        titles = [operator.title(), *operator.locator("h1, h2, tbody th").all_inner_texts()]
        faults += [f"{path}: named by id: {title}" for title in titles if UUID.search(title)]
    assert faults == []


def test_a_tenants_owner_is_kept_out(
    browser: Browser, site: Site, owners_cookies: StorageState
) -> None:
    with window(browser, site.base_url, but="status of 403", state=owners_cookies) as page:
        for path in PAGES:
            answer = page.goto(f"/admin/{path}")
            assert answer is not None
            assert answer.status == 403, path
        expect(page.get_by_role("heading", name="For operators")).to_be_visible()
