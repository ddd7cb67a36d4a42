"""A base model that can really be trained, and a dataset for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.adapters.models import Adapter, BaseModel
from controlplane.adapters.services import adapter_create, base_model_add
from controlplane.tenancy.scoping import tenant_scope
from controlplane.training.datasets import reports
from controlplane.training.datasets import services as dataset_services
from controlplane.training.models import Dataset
from controlplane.training.primitives import child
from controlplane.training.runs import batch_child
from tests.controlplane.conftest import Party
from tests.controlplane.training import quick_trainer
from tests.tiny_base import TINY_NAME, TINY_REVISION, write_tiny_base
from tests.trainers import warm_python


def chat_rows(number: int) -> bytes:
    """So many rows, none of them twice."""
    messages = [
        [{"role": "user", "content": f"hello {at}"}, {"role": "assistant", "content": "world"}]
        for at in range(number)
    ]
    return b"".join(json.dumps({"messages": row}).encode() + b"\n" for row in messages)


ROWS = chat_rows(8)
#: So many that whatever a tenant's salt is, a share of them leaves enough on both sides.
SHARED_ROWS = chat_rows(40)
FAST = {"rank": 4, "alpha": 8, "max_steps": 2, "batch_size": 4, "max_length": 64}


@pytest.fixture(scope="session")
def base_models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of base models, as the trainer's machine has one."""
    folder = tmp_path_factory.mktemp("bases")
    write_tiny_base(folder / TINY_NAME)
    return folder


def use_python(python: Path | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run this program where code of ours starts a trainer with its own Python."""
    for module in (batch_child, child, reports):
        monkeypatch.setattr(module, "sys", SimpleNamespace(executable=str(python)))


@pytest.fixture(scope="session")
def warm_trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_python(tmp_path_factory.mktemp("python"))


@pytest.fixture
def tiny_base(
    db: None,
    base_models_dir: Path,
    warm_trainer: Path,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> BaseModel:
    """Its trainers have imported already what takes five seconds, but for `real_trainer`."""
    use_python(warm_trainer, monkeypatch)
    settings.BASE_MODEL_DIR = base_models_dir
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings.TRAINER_ENVIRONMENT = settings.TRAINER_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    config = json.loads((base_models_dir / TINY_NAME / "config.json").read_text())
    return base_model_add(name=TINY_NAME, revision=TINY_REVISION, config=config)


@pytest.fixture
def in_acme(acme: Party) -> Iterator[Party]:
    """The test runs in acme's scope."""
    with tenant_scope(acme.tenant.id):
        yield acme


@pytest.fixture
def adapter(in_acme: Party, tiny_base: BaseModel) -> Adapter:
    return adapter_create(name="greeter", base_model_name=tiny_base.name)


@pytest.fixture
def dataset(in_acme: Party) -> Dataset:
    return dataset_services.dataset_upload(name="chats", content=ROWS)


def use_quick_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `quick_trainer` where a run's child is started."""
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nunset PWD\nexec "{sys.executable}" -S "{quick_trainer.__file__}" "$@"\n'
    )
    python.chmod(0o755)
    use_python(python, monkeypatch)


@pytest.fixture
def real_trainer(tiny_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers start as they do for users."""
    use_python(sys.executable, monkeypatch)


@pytest.fixture(params=["quick", pytest.param("real", marks=pytest.mark.long)])
def any_trainer(
    request: pytest.FixtureRequest,
    tiny_base: BaseModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For what happens around a trainer: a child that takes no seconds to start, then the real."""
    if request.param == "quick":
        use_quick_trainer(tmp_path, monkeypatch)
    else:
        use_python(sys.executable, monkeypatch)
