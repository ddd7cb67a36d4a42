"""Permissions: people have them by their roles, keys by their scopes."""

from __future__ import annotations

import enum


class Permission(enum.StrEnum):
    READ = "read"
    INFER = "infer"
    ADAPTERS_WRITE = "adapters:write"
    TRAINING_WRITE = "training:write"
    FILES_READ = "files:read"
    FILES_WRITE = "files:write"
    BATCHES_READ = "batches:read"
    BATCHES_WRITE = "batches:write"
    USAGE_READ = "usage:read"
    REQUESTS_READ = "requests:read"
    REQUESTS_CONTENT = "requests:content"  # prompts and answers, where they are stored
    AUDIT_READ = "audit:read"
    LIMITS_MANAGE = "limits:manage"
    WEBHOOKS_MANAGE = "webhooks:manage"
    KEYS_MANAGE = "keys:manage"
    MEMBERS_MANAGE = "members:manage"
    TENANT_MANAGE = "tenant:manage"


#: Permissions on all models of the tenant, which a key with `allowed_models` lacks.
OF_ALL_MODELS = frozenset(
    {Permission.AUDIT_READ, Permission.WEBHOOKS_MANAGE, Permission.TENANT_MANAGE}
)
#: All permissions that a key may have, in the order of the enumeration.
SCOPES = tuple(permission.value for permission in Permission)
VIEWER = frozenset({Permission.READ, Permission.USAGE_READ, Permission.REQUESTS_READ})
DEVELOPER = VIEWER | {
    Permission.INFER,
    Permission.ADAPTERS_WRITE,
    Permission.TRAINING_WRITE,
    Permission.FILES_READ,
    Permission.FILES_WRITE,
    Permission.BATCHES_READ,
    Permission.BATCHES_WRITE,
}
#: The default scopes of a key, in the order of the enumeration.
DEFAULT_SCOPES = tuple(permission.value for permission in Permission if permission in DEVELOPER)
