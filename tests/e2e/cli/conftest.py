"""The command line against the running platform, with a key that may do all that people may."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.seed import last_json, manage
from tests.cli.runner import Cli
from tests.e2e.adapters import lora_tensors, write_adapter
from tests.e2e.system import System

ADMIN_KEY = """
import json
from controlplane.tenancy.scoping import tenant_scope
from controlplane.tenants.key_rules import KeyRules
from controlplane.tenants.key_services import api_key_create
from controlplane.tenants.models import Membership, Tenant
from controlplane.tenants.permissions import Permission
with tenant_scope(Tenant.objects.get(slug="acme").id):
    rules = KeyRules(scopes=tuple(permission.value for permission in Permission))
    _, key = api_key_create(name="admin", rules=rules, owner=Membership.objects.first())
print(json.dumps({"key": key}))
"""


@pytest.fixture(scope="package")
def admin_key(system: System) -> str:
    """A key of acme's owner."""
    output = manage(system.env, "shell", "--no-imports", "-c", ADMIN_KEY)
    key: str = last_json(output)["key"]
    return key


@dataclasses.dataclass(frozen=True)
class Files:
    """What a person has to upload."""

    system: System
    folder: Path

    def adapter(self, name: str, *, seed: int = 7) -> Path:
        """A PEFT folder that fits the base model."""
        tensors = lora_tensors(self.system.base_config, seed=seed)
        return write_adapter(self.folder / name, tensors)

    def chats(self, name: str = "chats.jsonl", *, rows: int = 4) -> Path:
        path = self.folder / name
        line = (
            '{"messages": [{"role": "user", "content": "Total of 3 x 12?"},'
            ' {"role": "assistant", "content": "36"}]}\n'
        )
        path.write_text(line * rows)
        return path


@pytest.fixture
def cli(system: System, admin_key: str, tmp_path: Path) -> Cli:
    """Signed in by the environment."""
    home = tmp_path / "home"
    home.mkdir()
    return Cli(home, {"LORIKEET_URL": system.base_url, "LORIKEET_API_KEY": admin_key})


@pytest.fixture
def files(system: System, tmp_path: Path) -> Files:
    return Files(system, tmp_path)


@pytest.fixture(scope="module")
def trainer(system: System) -> Iterator[System]:
    """The platform with its trainer."""
    process = system.platform.trainer
    process.start()
    yield system
    process.ask_to_stop()
    process.stop()
