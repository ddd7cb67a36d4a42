"""`python -m tests.live_seed`: two tenants, each with keys and an adapter; prints them as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from contract.messages.protocol import adapter_digest  # noqa: E402
from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel  # noqa: E402
from controlplane.infra import storage  # noqa: E402
from controlplane.tenancy.scoping import tenant_scope  # noqa: E402
from controlplane.tenants import services  # noqa: E402
from tests.fakes import FAKE_CONTEXT, FAKE_NAME, FAKE_REVISION  # noqa: E402
from tests.tiny_base import ROOMY_CONTEXT, ROOMY_NAME, TINY_NAME, TINY_REVISION  # noqa: E402

#: Adapters that the examples in docs/ name.
DOCUMENTED = ("invoices", "letters", "letters-2024")


def add_adapter(
    base: BaseModel, name: str, config: dict[str, Any], *, is_stored: bool = True
) -> None:
    """An adapter of the tenant in scope whose version 1 is live."""
    adapter = Adapter.objects.create(name=name, base_model=base)
    adapter.live_version = add_version(adapter, 1, config, is_stored=is_stored)
    adapter.save()


def add_version(
    adapter: Adapter, number: int, config: dict[str, Any], *, is_stored: bool = True
) -> AdapterVersion:
    """A ready version with this config."""
    tensors = f"tensors of {adapter.name}".encode()
    version = AdapterVersion.objects.create(
        adapter=adapter,
        number=number,
        status=AdapterVersion.Status.READY,
        digest=adapter_digest(config, [tensors], FAKE_REVISION),
        num_bytes=len(tensors),
    )
    if is_stored:
        storage.put_bytes(version.config_key, json.dumps(config).encode())
        storage.put_bytes(version.tensors_key, tensors)
    return version


def seed() -> dict[str, dict[str, str]]:
    base = BaseModel.objects.create(
        name=FAKE_NAME, revision=FAKE_REVISION, config={}, context_length=FAKE_CONTEXT
    )
    for name, context in ((TINY_NAME, 512), (ROOMY_NAME, ROOMY_CONTEXT)):
        BaseModel.objects.create(
            name=name, revision=TINY_REVISION, config={}, context_length=context
        )
    BaseModel.objects.create(name="unserved", revision="0" * 64, config={}, context_length=64)
    tenants = {}
    for slug in ("acme", "globex"):
        tenant = services.tenant_create(slug=slug, name=slug.title())
        with tenant_scope(tenant.id):
            _, key = services.api_key_create(name="live")
            revoked, revoked_key = services.api_key_create(name="revoked")
            services.api_key_revoke(public_id=revoked.public_id)
            add_adapter(base, f"{slug}-adapter", {"name": slug})
            add_adapter(base, f"{slug}-second", {"name": slug, "second": 1})
            add_adapter(base, f"{slug}-misfit", {"name": slug, "unsupported": True})
            add_adapter(base, f"{slug}-lost", {"name": slug, "lost": 1}, is_stored=False)
            if slug == "acme":
                for name in DOCUMENTED:
                    add_adapter(base, name, {"name": name})
        tenants[slug] = {
            "id": str(tenant.id),
            "key": key,
            "revoked_key": revoked_key,
            "adapter": f"{slug}-adapter",
        }
    return tenants


if __name__ == "__main__":
    sys.stdout.write(json.dumps(seed()))
