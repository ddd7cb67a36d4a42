"""`python -m tests.live_adapter TENANT_ID NAME[@BASE] FOLDER…`: versions of a tenant's adapter of
the tiny base, or of another one with its revision."""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from contract.adapters.peft_config import UPLOAD_LIMITS, read_config  # noqa: E402
from contract.messages.protocol import adapter_digest  # noqa: E402
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel  # noqa: E402
from controlplane.infra import storage  # noqa: E402
from controlplane.tenancy.scoping import tenant_scope  # noqa: E402
from tests.tiny_base import TINY_NAME, TINY_REVISION  # noqa: E402


def add(tenant_id: str, name: str, folder: Path) -> None:
    """The PEFT folder as the next version; the first is live."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    labels = read_config(config, UPLOAD_LIMITS).labels
    name, _, base = name.partition("@")
    tensors = (folder / "adapter_model.safetensors").read_bytes()
    with tenant_scope(uuid.UUID(tenant_id)):
        base_model = BaseModel.objects.get(name=base or TINY_NAME)
        adapter, _ = Adapter.objects.get_or_create(name=name, base_model=base_model)
        version = AdapterVersion.objects.create(
            adapter=adapter,
            number=adapter.versions.count() + 1,
            status=AdapterVersion.Status.READY,
            digest=adapter_digest(config, [tensors], TINY_REVISION),
            num_bytes=len(tensors),
            report={"labels": labels},
        )
        adapter.live_version = adapter.live_version or version
        adapter.save()
        storage.put_bytes(version.config_key, json.dumps(config).encode())
        storage.put_bytes(version.tensors_key, tensors)


if __name__ == "__main__":
    for folder in sys.argv[3:]:
        add(sys.argv[1], sys.argv[2], Path(folder))
