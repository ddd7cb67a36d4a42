"""The permissions of each role."""

from __future__ import annotations

from controlplane.tenants.models import Role
from controlplane.tenants.permissions import DEVELOPER, VIEWER, Permission

PERMISSIONS: dict[Role, frozenset[Permission]] = {
    Role.OWNER: frozenset(Permission),
    # An admin cannot change the tenant itself, and so cannot make an owner.
    Role.ADMIN: frozenset(Permission) - {Permission.TENANT_MANAGE},
    Role.DEVELOPER: DEVELOPER,
    Role.VIEWER: VIEWER,
    Role.BILLING: frozenset({Permission.READ, Permission.USAGE_READ, Permission.LIMITS_MANAGE}),
}
