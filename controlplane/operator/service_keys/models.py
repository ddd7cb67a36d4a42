"""The table of service keys. Only code inside `all_tenants` sees its rows."""

from __future__ import annotations

from django.db import models

from controlplane.tenancy.scoping import new_id
from controlplane.tenants.models import Credential


class ServiceKey(Credential):
    """A credential of /ops/v1. It belongs to no tenant, and outlives the person who made it."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)
    #: Values of `controlplane.operator.service_keys.scopes.Scope`.
    scopes = models.JSONField()
