"""`python -m tests.live_warmth TENANT_ID NAME WARMTH…`: a turn of what keeps adapters warm.

Before it, aliases are made that keep versions 1, 2, … so.
"""

from __future__ import annotations

import os
import sys
import uuid

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from controlplane.aliases.contents import Contents, Part  # noqa: E402
from controlplane.aliases.models import Alias  # noqa: E402
from controlplane.aliases.services import alias_create  # noqa: E402
from controlplane.queue.placement.warmth import warmth_keep  # noqa: E402
from controlplane.tenancy.scoping import tenant_scope  # noqa: E402

if __name__ == "__main__":
    tenant_id, name, *kept = sys.argv[1:]
    with tenant_scope(uuid.UUID(tenant_id)):
        for number, warmth in enumerate(kept, start=1):
            if not Alias.objects.filter(name=f"{name}-{warmth}").exists():
                target = (Part(adapter=name, version=number),)
                alias_create(
                    name=f"{name}-{warmth}", contents=Contents(primary=target, warmth=warmth)
                )
    sys.stdout.write(str(warmth_keep()))
