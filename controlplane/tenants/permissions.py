"""What there is to allow, and what each role has of it. A key's scopes are permissions too."""

from __future__ import annotations

import enum

from controlplane.tenants.models import Role


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
    REQUESTS_CONTENT = "requests:content"  # what requests said, where that is kept
    AUDIT_READ = "audit:read"
    LIMITS_MANAGE = "limits:manage"
    KEYS_MANAGE = "keys:manage"
    MEMBERS_MANAGE = "members:manage"
    TENANT_MANAGE = "tenant:manage"


_VIEWER = frozenset({Permission.READ, Permission.USAGE_READ, Permission.REQUESTS_READ})
_DEVELOPER = _VIEWER | {
    Permission.INFER,
    Permission.ADAPTERS_WRITE,
    Permission.TRAINING_WRITE,
    Permission.FILES_READ,
    Permission.FILES_WRITE,
    Permission.BATCHES_READ,
    Permission.BATCHES_WRITE,
}
PERMISSIONS: dict[Role, frozenset[Permission]] = {
    Role.OWNER: frozenset(Permission),
    # An admin may do all but change the tenant itself, so cannot make an owner either.
    Role.ADMIN: frozenset(Permission) - {Permission.TENANT_MANAGE},
    Role.DEVELOPER: _DEVELOPER,
    Role.VIEWER: _VIEWER,
    Role.BILLING: frozenset({Permission.READ, Permission.USAGE_READ, Permission.LIMITS_MANAGE}),
}
#: Of a key that says nothing else, in the order of the enumeration.
DEFAULT_SCOPES = tuple(permission.value for permission in Permission if permission in _DEVELOPER)
