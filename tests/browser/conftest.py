"""The whole control plane as it is deployed, and a browser in front of it.

Everything runs in processes of its own, on a database of its own: the web server with the collected
static files, and a Celery worker for the checks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
from playwright.sync_api import Browser, Page, StorageState, expect, sync_playwright

from demo.commands import Commands
from demo.ports import HOST, choose_ports
from demo.processes import ChildProcess, Command
from demo.stack import EmbeddedStack
from tests.database import migrated_database
from tests.oidc_issuer import CLIENT_ID, CLIENT_SECRET, Issuer
from tests.short_base import short_base

ROOT = Path(__file__).parent.parent.parent
# Playwright's 5 s are short for a page of a server that shares two cores with other tests.
expect.set_options(timeout=20_000)
EMAIL, PASSWORD = "owner@acme.example", "a long enough passphrase"
#: Owns the tenant of `walked_pages`.
WALKER = "owner@walk.example"
#: The first has no window, and uses a third of the processor time.
CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser")
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclasses.dataclass(frozen=True)
class Site:
    """A running control plane with the tenant acme and one base model."""

    base_url: str
    commands: Commands
    #: Where its mails lie, one file each.
    mail: Path
    #: Of its processes, for further ones.
    env: Mapping[str, str]

    @property
    def named_url(self) -> str:
        """The same by a host's name: passkeys are not for addresses."""
        return self.base_url.replace(HOST, "localhost")

    def add_person(self, name: str, role: str = "developer") -> str:
        """Make a member of acme with PASSWORD; their address."""
        email = f"{name}@acme.example"
        self.manage(
            *("member_add", "--tenant=acme", f"--email={email}", f"--role={role}"),
            "--password-stdin",
            text=PASSWORD + "\n",
        )
        return email

    def manage(self, *argv: str, text: str = "") -> None:
        """Run one of Django's commands, with `text` as its standard input."""
        self.commands.run(*argv, stdin=text)


@pytest.fixture(scope="session")
def base_model_dir() -> Path:
    return short_base()


@pytest.fixture(scope="session")
def issuer() -> Iterator[Issuer]:
    """People may sign in to the site with it."""
    made = Issuer()
    yield made
    made.close()


@pytest.fixture(scope="session")
def site(
    stack: EmbeddedStack,
    base_model_dir: Path,
    issuer: Issuer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    [port] = choose_ports(1)
    base_url = f"http://{HOST}:{port}"
    env = {
        **os.environ,
        **_own_databases(stack.env),
        "LORIKEET_BASE_URL": base_url,
        "LORIKEET_STATIC_ROOT": str(folder / "static"),
        "EMAIL_URL": f"file://{folder}/mail",
        "LORIKEET_OIDC_ISSUER": issuer.url,
        "LORIKEET_OIDC_NAME": "Test issuer",
        "LORIKEET_OIDC_CLIENT_ID": CLIENT_ID,
        "LORIKEET_OIDC_CLIENT_SECRET": CLIENT_SECRET,
        "OMP_NUM_THREADS": "1",
    }
    running = Site(base_url, Commands(env), folder / "mail", env)
    running.manage("collectstatic", "--noinput", "--verbosity=0")
    running.manage("base_model_add", str(base_model_dir))
    running.manage("tenant_create", "--slug=acme", "--name=Acme")
    rules = "from controlplane.infra import storage; storage.cors_allow()"
    running.manage("shell", "--no-imports", "-c", rules)
    assert running.add_person("owner", "owner") == EMAIL
    processes = [
        _process("web", folder, env, "controlplane.serve", f"--port={port}"),
        _process("ingest", folder, env, *"celery -A controlplane worker -Q ingest -P solo".split()),
    ]
    try:
        for process in processes:
            process.start()
        processes[0].wait_until(lambda: _answers(f"{base_url}/healthz"), timeout_s=60)
        yield running
    finally:
        for process in processes:
            process.stop()
        running.commands.close()


@pytest.fixture(scope="session")
def walked_pages(site: Site) -> list[str]:
    """Pages of the tenant walk that name something, with long contents."""
    site.manage("tenant_create", "--slug=walk", "--name=Walk")
    owner = ("member_add", "--tenant=walk", f"--email={WALKER}", "--role=owner")
    site.manage(*owner, "--password-stdin", text=PASSWORD + "\n")
    argv = [sys.executable, "-m", "tests.browser.console_seed"]
    told = subprocess.run(
        argv, cwd=ROOT, env=dict(site.env), check=True, stdout=subprocess.PIPE, text=True
    )
    return [line for line in told.stdout.splitlines() if re.match(r"[a-z]+/", line)]


def _own_databases(env: dict[str, str]) -> dict[str, str]:
    """The stack's addresses with a new PostgreSQL database and unused Redis ones."""
    redis = urlsplit(env["REDIS_URL"])
    return {
        **env,
        **migrated_database(env, "browser"),
        "REDIS_URL": urlunsplit(redis._replace(path="/8")),
        "CELERY_BROKER_URL": urlunsplit(redis._replace(path="/9")),
    }


def _process(name: str, folder: Path, env: dict[str, str], *module: str) -> ChildProcess:
    return ChildProcess(
        name,
        Command(argv=[sys.executable, "-m", *module], env=env, cwd=ROOT),
        log=folder / f"{name}.log",
        pid_file=folder / f"{name}.json",
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def adapter_dir(base_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT adapter of the base model: the folder in LORIKEET_TEST_ADAPTER, or a random one."""
    if given := os.environ.get("LORIKEET_TEST_ADAPTER"):
        return Path(given)
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,  # random: B is not zero
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base_model_dir), config)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    # While it runs, this thread has an event loop and Django's ORM refuses to work in it; so it
    # ends with the module, and the tests here touch the database through the pages alone.
    with sync_playwright() as playwright:
        executable = found or playwright.chromium.executable_path  # of `playwright install`
        if not Path(executable).exists():
            pytest.fail("Chromium is missing; on Debian: apt-get install chromium-headless-shell")
        chromium = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def window(
    browser: Browser, base_url: str, but: str = "$^", state: StorageState | None = None
) -> Iterator[Page]:
    """A fresh window in which nobody is signed in; errors in it, of any page, fail the test.

    So does what the security policy forbids: the browser tells it as an error.

    but    a pattern of errors that are meant: the browser tells answers of 404 as one
    state  cookies of somebody who is signed in
    """
    context = browser.new_context(base_url=base_url, storage_state=state)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    yield opened
    context.close()
    assert [problem for problem in problems if not re.search(but, problem)] == []


def sign_in(page: Page, email: str, password: str = PASSWORD) -> None:
    """By password; what follows it is the caller's."""
    page.goto("/console/sign-in")
    page.get_by_label("E-mail address").fill(email)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()


@pytest.fixture(scope="module")
def owners_cookies(browser: Browser, site: Site) -> StorageState:
    """Of acme's owner, who has signed in; for a module, as some pages ask again after minutes."""
    with window(browser, site.base_url) as opened:
        sign_in(opened, EMAIL)
        opened.wait_for_url("**/console/")
        return opened.context.storage_state()


@pytest.fixture
def page(browser: Browser, site: Site, owners_cookies: StorageState) -> Iterator[Page]:
    """A window in which acme's owner is signed in."""
    with window(browser, site.base_url, state=owners_cookies) as opened:
        opened.goto("/console/")
        yield opened
