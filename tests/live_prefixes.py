"""`python -m tests.live_prefixes TENANT_ID [ALIAS:WARMTH:PROMPT…]`: a turn of what keeps prompts.

Before it, the aliases get these system prompts; all name the tenant's adapter `sorted`.
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
from controlplane.aliases.services import alias_change, alias_create  # noqa: E402
from controlplane.queue.placement.prefix_warmth import prefixes_keep  # noqa: E402
from controlplane.tenancy.scoping import tenant_scope  # noqa: E402

if __name__ == "__main__":
    tenant_id, *changes = sys.argv[1:]
    with tenant_scope(uuid.UUID(tenant_id)):
        for change in changes:
            name, warmth, prompt = change.split(":", 2)
            says = {"system_prompt": prompt, "warmth": warmth}
            alias = Alias.objects.filter(name=name).first()
            if alias is None:
                target = (Part(adapter="sorted", version=1),)
                alias_create(name=name, contents=Contents(primary=target, **says))
            else:
                alias_change(alias=alias, changes=says)
    sys.stdout.write(str(prefixes_keep()))
