"""`python -m tests.browser.alias_seed`: acme's alias `prod`, in the middle of a ramp."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel  # noqa: E402
from controlplane.aliases import ramps, services  # noqa: E402
from controlplane.aliases.contents import Contents, Part  # noqa: E402
from controlplane.aliases.models import AliasPart, TargetCount  # noqa: E402
from controlplane.aliases.verdict import Counts  # noqa: E402
from controlplane.tenancy.scoping import tenant_scope  # noqa: E402
from controlplane.tenants.models import Tenant  # noqa: E402

Target = AliasPart.Target

COUNTS = {
    Target.PRIMARY: Counts(
        requests=1480,
        errors=3,
        checked=1480,
        broken=12,
        truncated=20,
        first_token={26: 300, 28: 700, 30: 480},
        token={30: 800, 32: 680},
    ),
    Target.CANARY: Counts(
        requests=150,
        errors=1,
        checked=150,
        broken=3,
        truncated=2,
        first_token={26: 30, 28: 70, 30: 50},
        token={30: 80, 33: 70},
    ),
}


def seed() -> None:
    tenant = Tenant.objects.get(slug="acme")
    with tenant_scope(tenant.id):
        adapter = Adapter.objects.create(name="receipts", base_model=BaseModel.objects.get())
        versions = [
            AdapterVersion.objects.create(
                adapter=adapter, number=number, status="ready", digest=f"{number:064x}"
            )
            for number in (1, 2)
        ]
        adapter.live_version = versions[0]
        adapter.save()
        contents = Contents(
            primary=(Part(adapter="receipts"),), canary=(Part(adapter="receipts", version=2),)
        )
        alias = services.alias_create(name="prod", contents=contents)
        ramps.ramp_start(alias=alias, steps=ramps.DEFAULT_STEPS, reason="better dates")
        alias.refresh_from_db()
        revision = services.revision_get(alias=alias)
        for target, counts in COUNTS.items():
            row = TargetCount(revision=revision, target=target)
            row.put(counts)
            row.save()


if __name__ == "__main__":
    seed()
