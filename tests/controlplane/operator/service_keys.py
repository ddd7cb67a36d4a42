"""Clients with a service key, for the tests of /ops/v1."""

from __future__ import annotations

from typing import Any

from rest_framework.test import APIClient

from controlplane.operator.service_keys.models import ServiceKey
from controlplane.operator.service_keys.scopes import Scope
from controlplane.operator.service_keys.services import service_key_create
from controlplane.tenancy.scoping import all_tenants


def make_service_key(*scopes: str, **fields: Any) -> tuple[ServiceKey, str]:
    """A new key; without scopes named it has all."""
    with all_tenants(reason="test"):
        return service_key_create(name="script", scopes=scopes or tuple(Scope), **fields)


def with_key(text: str) -> APIClient:
    client = APIClient(enforce_csrf_checks=True)
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {text}")
    return client


def as_service_key(*scopes: str, **fields: Any) -> APIClient:
    """A client of /ops/v1 with a new service key."""
    return with_key(make_service_key(*scopes, **fields)[1])
