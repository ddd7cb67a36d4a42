"""`python -m tests.live_canary TENANT_ID NAME PERCENT FAILS`: an alias with a canary.

Its primary is version 1 of an adapter `NAME-model`; FAILS percent of the requests of its canary,
version 2, fail. Prints the alias's id.
"""

from __future__ import annotations

import os
import sys
import uuid

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from controlplane.adapters.models import Adapter, AdapterVersion, BaseModel  # noqa: E402
from controlplane.aliases import services  # noqa: E402
from controlplane.aliases.contents import Contents, Part  # noqa: E402
from controlplane.tenancy.scoping import tenant_scope  # noqa: E402
from tests.fakes import FAKE_NAME  # noqa: E402
from tests.live_seed import add_adapter, add_version  # noqa: E402


def add(tenant_id: str, name: str, percent: int, fails_percent: int) -> str:
    with tenant_scope(uuid.UUID(tenant_id)):
        model = f"{name}-model"
        base = BaseModel.objects.get(name=FAKE_NAME)
        add_adapter(base, model, {"name": model})
        config = {"name": model, "fails_percent": fails_percent}
        add_version(Adapter.objects.get(name=model), 2, config)
        assert AdapterVersion.objects.filter(adapter__name=model).count() == 2
        contents = Contents(
            primary=(Part(adapter=model),),
            canary=(Part(adapter=model, version=2),),
            canary_percent=percent,
        )
        return str(services.alias_create(name=name, contents=contents).pk)


if __name__ == "__main__":
    sys.stdout.write(add(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
