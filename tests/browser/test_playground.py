"""The playground in a browser, before a real worker with a small model and a real accountant."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from playwright.sync_api import Browser, Locator, Page, Route, expect

from contract.messages import protocol
from demo.processes import ChildProcess, Command
from tests.browser.conftest import ROOT, Site, sign_in, window
from tests.live import wait_for
from tests.tiny_base import TINY_NAME, write_tiny_base

pytestmark = pytest.mark.browser

READY_TIMEOUT_MS = 60_000
RUN_TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def base(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base model of the site's that a worker serves."""
    folder = tmp_path_factory.mktemp("playground")
    base = write_tiny_base(folder / "base")
    site.manage("base_model_add", str(base))
    env = {
        **site.env,
        "LORIKEET_BASE_MODEL": str(base),
        "LORIKEET_ADAPTER_DIR": str(folder / "adapters"),
        "LORIKEET_WORKER_ID": "playground",
        "LORIKEET_DEVICE": "cpu",
    }
    processes = [
        ChildProcess(
            name,
            Command(argv=[sys.executable, *argv], env=env, cwd=ROOT),
            log=folder / f"{name}.log",
            pid_file=folder / f"{name}.json",
        )
        for name, argv in (("worker", ["-m", "worker"]), ("books", ["manage.py", "accountant"]))
    ]
    try:
        for process in processes:
            process.start()
        with redis.Redis.from_url(env["REDIS_URL"], protocol=2) as client:
            pool = env.get("LORIKEET_POOL", "default")
            key = protocol.worker_key(pool, "playground")

            def is_up() -> bool:
                payload = client.hget(key, "m")
                return bool(payload) and not protocol.Heartbeat.decode(payload).loading

            wait_for(is_up, timeout_s=120, what="the worker's start")
        yield base
    finally:
        for process in processes:
            process.stop()


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two different adapters of the base."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        config = LoraConfig(
            r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
        )
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        folders.append(tmp_path_factory.mktemp("adapter"))
        model.save_pretrained(folders[-1])
    return folders


def upload(page: Page, name: str, folder: Path, number: int) -> None:
    page.goto("/console/upload")
    page.get_by_label("Adapter name").fill(name)
    page.get_by_label("Base model", exact=True).select_option(TINY_NAME)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        page.get_by_label(file).set_input_files(folder / file)
    page.get_by_role("button", name="Upload").click()
    page.wait_for_url(f"**/adapters/{name}/versions/{number}", timeout=READY_TIMEOUT_MS)
    heading = "Ready and live" if number == 1 else "Ready"
    expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible(
        timeout=READY_TIMEOUT_MS
    )


@pytest.fixture(scope="module")
def held(browser: Browser, site: Site, adapters: list[Path], owners_cookies: object) -> str:
    """An adapter whose version 1 is live, and whose version 2 waits."""
    with window(browser, site.base_url, state=owners_cookies) as page:  # type: ignore[arg-type]
        for number, folder in enumerate(adapters, start=1):
            upload(page, "support", folder, number)
    return "support"


#: Visible parts of a column that are drawn over the part before them.
OVERLAPS = """[...document.querySelectorAll('.try')].flatMap(column => {
    const parts = [...column.children].filter(part => part.offsetParent);
    const box = part => part.getBoundingClientRect();
    return parts.filter((part, i) => i && box(part).top < box(parts[i - 1]).bottom)
        .map(part => part.className);
})"""


def ask(page: Page, text: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(text)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("24")
    page.get_by_role("button", name="Run", exact=True).click()


def columns(page: Page) -> Locator:
    return page.locator(".try")


def state(column: Locator) -> Locator:
    return column.locator("[data-state]")


def figure(column: Locator, name: str) -> str:
    return column.locator(f'[data-figure="{name}"]').inner_text()


def plain(column: Locator) -> str:
    """A column's answer without what is only in the other's."""
    script = """node => { const copy = node.cloneNode(true);
        copy.querySelectorAll("del, .visually-hidden").forEach(each => each.remove());
        return copy.textContent; }"""
    return str(column.locator("[data-answer]").evaluate(script))


def test_compare_with_live_make_live_and_roll_back(page: Page, held: str) -> None:
    page.goto(f"/console/adapters/{held}/versions/2")
    page.get_by_role("link", name="Compare with live").click()
    page.wait_for_url(f"**/playground?model={held}&model={held}@2")
    ask(page, "hello world")
    for number, column in enumerate(columns(page).all(), start=1):
        expect(state(column)).to_have_text("Done", timeout=RUN_TIMEOUT_MS)
        assert figure(column, "served") == f"{held}@{number}"
        assert figure(column, "written") == "24"
        assert figure(column, "reason") == "length"
        assert re.fullmatch(r"[\d,.]+ m?s", figure(column, "first"))
        assert float(figure(column, "speed").replace(",", "")) > 0
    assert page.evaluate(OVERLAPS) == []
    first, second = columns(page).all()
    assert plain(first) != plain(second) != ""
    expect(second.locator("ins").first).to_contain_text("[inserted:")
    changes = second.locator("[data-changes]")
    expect(changes).to_contain_text("Compared with model 1")
    page.get_by_label("Mark word differences").uncheck()
    expect(second.locator("ins, del")).to_have_count(0)

    page.get_by_label("Reason (optional)").fill("it answers better")
    page.get_by_role("button", name="Make live").click()
    expect(page.get_by_text("Version 2 is live.")).to_be_visible()
    expect(page.get_by_text("it answers better")).to_be_visible()
    page.get_by_role("button", name="Roll back to version 1").click()
    expect(page.get_by_text("Version 1 is live again.")).to_be_visible()


def test_a_difference_is_told_in_words_that_there_are(page: Page) -> None:
    page.goto("/console/playground")
    told = """([counts, isSame]) => import("/static/console/playground/diff.js")
        .then(({ told }) => told(counts, isSame))"""

    def sentence(inserted: int, deleted: int, is_same: bool = False) -> str:
        counts = {"inserted": inserted, "deleted": deleted}
        return str(page.evaluate(told, [counts, is_same]))

    assert sentence(0, 0, is_same=True) == "The same text as model 1."
    assert sentence(0, 0) == "The same words as model 1; spaces or punctuation differ."
    assert sentence(0, 1) == "Compared with model 1: 1 word deleted (struck through)."
    both = "2 words inserted (underlined), 3 words deleted (struck through)"
    assert sentence(2, 3) == f"Compared with model 1: {both}."


def test_vectors_of_two_texts(page: Page, base: Path) -> None:
    page.goto("/console/playground")
    part = page.locator("[data-vectors]")
    part.get_by_text("Vectors and labels").click()
    part.get_by_label("Model").fill(TINY_NAME)
    part.get_by_label("Text", exact=True).fill("hello world")
    part.get_by_label("Another text").fill("hello world")
    part.get_by_role("button", name="Compute").click()
    expect(part.get_by_text("Similarity 1.0000")).to_be_visible(timeout=RUN_TIMEOUT_MS)
    expect(part.get_by_text("32 numbers").first).to_be_visible()


def test_an_answer_becomes_a_case_of_a_suite(page: Page, base: Path) -> None:
    page.goto(f"/console/playground?model={TINY_NAME}")
    ask(page, "which <words>?")
    [column] = columns(page).all()
    expect(state(column)).to_have_text("Done", timeout=RUN_TIMEOUT_MS)
    with page.expect_popup() as opened:
        column.get_by_role("button", name="Add to a suite").click()
    case = opened.value
    expect(case.get_by_label("Expected answer")).to_have_value(plain(column))
    case.get_by_label("Expected answer").fill("these words")
    case.get_by_label("Suite", exact=True).fill("from-playground")
    case.get_by_role("button", name="Add the case").click()
    expect(case.get_by_role("heading", name="from-playground", exact=True)).to_be_visible()
    expect(case.get_by_text("which <words>?")).to_be_visible()
    expect(case.get_by_text("these words")).to_be_visible()
    # And it runs from there.
    case.get_by_label("Model").fill(TINY_NAME)
    case.get_by_role("button", name="Run it").click()
    expect(case.get_by_text("The suite runs, after interactive requests.")).to_be_visible()
    expect(case.get_by_role("button", name="Cancel")).to_be_visible()


def test_a_viewer_cannot(browser: Browser, site: Site, held: str) -> None:
    email = site.add_person("watcher", "viewer")
    with window(browser, site.base_url, but="status of 403") as page:
        sign_in(page, email)
        page.wait_for_url("**/console/")
        expect(page.get_by_role("link", name="Playground")).to_have_count(0)
        page.goto(f"/console/adapters/{held}/versions/2")
        expect(page.get_by_role("heading", name="Ready", exact=True)).to_be_visible()
        expect(page.get_by_role("link", name="Compare with live")).to_have_count(0)
        expect(page.get_by_role("button", name="Make live")).to_have_count(0)
        page.goto(f"/console/playground?model={held}&model={held}@2")
        expect(page.get_by_role("heading", name="Your role may not do this")).to_be_visible()


def test_a_column_that_fails_hurts_no_other(
    browser: Browser, site: Site, held: str, owners_cookies: object
) -> None:
    state_of_owner = {"state": owners_cookies, "but": "status of 404|ERR_FAILED"}
    with window(browser, site.base_url, **state_of_owner) as page:  # type: ignore[arg-type]
        page.goto(f"/console/playground?model={held}")
        page.get_by_role("button", name="Add a model").click()
        expect(page.get_by_label("Name of model 2")).to_be_focused()
        page.keyboard.type("no-such-model")
        ask(page, "hello")
        good, bad = columns(page).all()
        expect(bad.get_by_role("alert")).to_contain_text("invalid_request_error, model_not_found")
        expect(bad.get_by_role("alert")).to_contain_text("(field: model)")
        expect(state(good)).to_have_text("Done", timeout=RUN_TIMEOUT_MS)

        page.get_by_label("Name of model 2").fill(f"{held}@1")
        page.route("**/playground/run", lambda route: route.abort())
        bad.get_by_role("button", name="Run this one again").click()
        expect(bad.get_by_role("alert")).to_contain_text("The console does not answer.")
        expect(state(good)).to_have_text("Done")
        page.unroute("**/playground/run")
        bad.get_by_role("button", name="Run this one again").click()
        expect(state(bad)).to_have_text("Done", timeout=RUN_TIMEOUT_MS)
        expect(bad.locator("[data-changes]")).to_have_text("The same text as model 1.")


def test_stop_and_keys(page: Page, held: str) -> None:
    page.goto(f"/console/playground?model={held}&model={TINY_NAME}")
    waiting: list[Route] = []
    page.route("**/playground/run", lambda route: waiting.append(route))
    page.get_by_role("button", name="Blend with another adapter").first.click()
    page.get_by_label("Weight of adapter 1").first.fill("")
    page.get_by_role("button", name="Remove adapter 2").click()  # what is hidden does not matter
    page.get_by_label("Prompt", exact=True).fill("hello")
    page.keyboard.press("Control+Enter")
    stop = page.get_by_role("button", name="Stop", exact=True)
    stop.focus()
    for column in columns(page).all():
        expect(state(column)).to_have_text("Waiting for the first token")
    page.keyboard.press("Enter")
    for column in columns(page).all():
        expect(state(column)).to_have_text("Stopped")
    expect(stop).to_be_hidden()
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_focused()
    for route in waiting:
        route.abort()


def test_the_linter_reports_while_a_schema_is_typed(
    browser: Browser, site: Site, owners_cookies: object
) -> None:
    state_of_owner = {"state": owners_cookies, "but": "status of 400"}
    with window(browser, site.base_url, **state_of_owner) as page:  # type: ignore[arg-type]
        page.goto("/console/playground")
        page.get_by_text("JSON schema", exact=True).click()
        field = page.get_by_label("The answer must match this JSON schema")
        report = page.locator("[data-report]")
        field.press_sequentially('{"type": "object"')
        expect(report).to_contain_text("This is not JSON yet")
        field.press_sequentially("}")
        expect(report).to_contain_text("Every keyword is enforced")
        expect(field).not_to_have_attribute("aria-invalid", "true")
        field.fill('{"type": "array", "uniqueItems": true}')
        expect(report).to_contain_text("Not every keyword can be enforced")
        expect(report.locator("li").filter(has_text="/uniqueItems")).to_contain_text("checked")
        field.fill('{"type": 7}')
        expect(report).to_contain_text("'schema'")


def test_the_code_shown_asks_for_the_same(page: Page, site: Site, held: str) -> None:
    page.goto("/console/keys")
    page.get_by_label("Name").fill("shown code")
    page.get_by_role("button", name="Create key").click()
    key = page.locator("#new-key").inner_text()
    page.goto(f"/console/playground?model={held}@1")
    page.get_by_role("button", name="Blend with another adapter").click()
    page.get_by_label("Adapter 2 of model 1").fill(f"{held}@2")
    page.get_by_label("Weight of adapter 2").fill("0.5")
    page.get_by_label("System prompt").fill('It\'s "quoted"\nand $HOME is kept')
    ask(page, "hello")
    column = columns(page).first
    expect(state(column)).to_have_text("Done", timeout=RUN_TIMEOUT_MS)
    assert figure(column, "served") == f"1 * {held}@1 + 0.5 * {held}@2"
    said = plain(column)
    column.get_by_text("Show code").click()
    shown = {}
    for language in ("curl", "Python", "JavaScript"):
        column.get_by_role("button", name=language, exact=True).click()
        shown[language] = column.locator("[data-code-text]").inner_text()

    env = {**os.environ, "LORIKEET_API_KEY": key}
    done = {"env": env, "capture_output": True, "text": True, "timeout": 60, "check": True}
    lines = subprocess.run(["bash", "-c", shown["curl"]], **done).stdout.split("\n\n")  # type: ignore[call-overload]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == said
    answer = subprocess.run([sys.executable, "-c", shown["Python"]], **done).stdout  # type: ignore[call-overload]
    assert answer == said
    body = re.search(r"completions\.create\((\{.*\})\);", shown["JavaScript"], re.DOTALL)
    assert body
    assert json.loads(body[1])["adapters"][1] == {"name": f"{held}@2", "weight": 0.5}


def test_a_logged_request_is_tried_again(page: Page, held: str) -> None:
    page.goto(f"/console/playground?model={held}@1")
    ask(page, "once more")
    column = columns(page).first
    expect(state(column)).to_have_text("Done", timeout=RUN_TIMEOUT_MS)
    address = column.get_by_role("link", name="This request in the log").get_attribute("href")
    page.goto(f"/console/requests?model={held}@1")  # which goes on by itself
    page.locator(f'a[href="{address}"]').click(timeout=30_000)
    page.get_by_role("link", name="Try again in the playground").click()
    expect(page.get_by_label("Name of model 1")).to_have_value(f"{held}@1")
    expect(page.get_by_label("Max tokens")).to_have_value("24")
