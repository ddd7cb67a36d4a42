"""Brings the whole platform up once for this folder's tests, on the CPU with SmolLM2.

With its first layers: see `tests.short_base`. LORIKEET_TEST_BASE=whole has them run on all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from demo import seed
from demo.commands import Commands
from demo.platform import Platform, environment
from demo.stack import EmbeddedStack
from demo.state import DemoState
from tests.database import migrated_database, operator_url
from tests.e2e.adapters import lora_tensors, write_adapter
from tests.e2e.system import System, read_base_config
from tests.short_base import short_base
from tests.trainers import warm_site
from worker.base_model import PACKAGED_MODEL, packaged_model

BASE_MODELS = seed.ROOT / ".cache" / "base"


@pytest.fixture(scope="package")
def system(stack: EmbeddedStack) -> Iterator[System]:
    folder = stack.folder / "system"
    is_whole = os.environ.get("LORIKEET_TEST_BASE") == "whole"
    base_model_dir = packaged_model(BASE_MODELS) if is_whole else short_base()
    state = DemoState.load(folder / "state.json")
    # Databases of their own: other tests use the same Redis.
    redis = stack.env["REDIS_URL"].removesuffix("/0")
    own = {
        **migrated_database(stack.env, "lorikeet_system"),
        "REDIS_URL": f"{redis}/2",
        "CELERY_BROKER_URL": f"{redis}/3",
    }
    env = environment(
        stack.env | own, folder=folder, base_url=state.base_url, base_model_dir=base_model_dir
    )
    with Commands(env) as commands:  # its database is migrated
        commands.run("collectstatic", "--no-input", "--verbosity=0")
        seed.seed(commands, state)
        commands.run("base_model_add", str(base_model_dir))
    # What trains, inspects and reports is a fork, but in the long tests.
    if not is_whole:
        env["PYTHONPATH"] = str(warm_site(folder))
    if os.environ.get("LORIKEET_TEST_DEVICE") == "cuda":  # see test_card
        env |= {"LORIKEET_DEVICE": "cuda", "LORIKEET_TRAINER_GPU_SHARE": "0.2"}
    env |= {"LORIKEET_LOG_FORMAT": "json", "LORIKEET_LOG_LEVEL": "DEBUG"}
    # Webhooks' receivers are on this machine.
    env["LORIKEET_OUTBOUND_HOSTS"] = "127.0.0.1"
    env["LORIKEET_OUTBOUND_ALLOWED_NETWORKS"] = "127.0.0.0/8"
    platform = Platform(env, folder=folder, port=state.web_port)
    processes = (platform.worker, platform.web, platform.accountant, platform.celery)
    try:
        for process in processes:
            process.start()
        platform.wait_until_ready()
        system = System(
            platform=platform,
            env=env,
            tenants={tenant.slug: tenant for tenant in state.tenants},
            database_url=operator_url(env["DATABASE_URL"]),
            base_model=PACKAGED_MODEL,
            base_config=read_base_config(base_model_dir),
        )
        for number, tenant in enumerate(state.tenants):
            tensors = lora_tensors(system.base_config, seed=number)
            made = write_adapter(folder / "made" / tenant.slug, tensors)
            with contextlib.closing(system.management(tenant.slug)) as client:
                client.upload_adapter(tenant.adapter, made, base_model=PACKAGED_MODEL)
        yield system
    finally:
        for process in processes:
            process.ask_to_stop()
        for process in processes:
            process.stop()


@pytest.fixture(autouse=True)
def whole_again(system: System) -> Iterator[None]:
    """A test may kill processes; the next one finds them running."""
    yield
    platform = system.platform
    for process in (platform.worker, platform.web, platform.accountant, platform.celery):
        if not process.is_running():
            process.start()
    platform.wait_until_ready()
