"""`python -m bench.refusals_seed NUMBER`: keys that are refused, in the tenant acme; as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from controlplane.limits.services import budget_set, rate_limit_set  # noqa: E402
from controlplane.tenancy.scoping import tenant_scope  # noqa: E402
from controlplane.tenants import keys, services  # noqa: E402
from controlplane.tenants.key_rules import KeyRules  # noqa: E402
from controlplane.tenants.models import Tenant  # noqa: E402


def seed(number: int) -> dict[str, Any]:
    """Make keys of each kind; `number` of those that are used once."""
    with tenant_scope(Tenant.objects.get(slug="acme").id):
        _, narrow = services.api_key_create(name="narrow", rules=KeyRules(scopes=("read",)))
        limited, limited_text = services.api_key_create(name="limited")
        rate_limit_set(api_key_id=limited.id, requests_per_minute=1)
        spent, spent_text = services.api_key_create(name="spent")
        budget_set(api_key_id=spent.id, hard_limit=1)
        fresh = [services.api_key_create(name=f"fresh {at}")[1] for at in range(number)]
    return {
        "narrow": narrow,
        "limited": limited_text,
        "spent": spent_text,
        "fresh": fresh,
        "unknown": [keys.generate().text() for _ in range(number)],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(seed(int(sys.argv[1]))))
