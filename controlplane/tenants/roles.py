"""What each role has of the permissions."""

from __future__ import annotations

from controlplane.tenants.models import Role
from controlplane.tenants.permissions import DEVELOPER, VIEWER, Permission

PERMISSIONS: dict[Role, frozenset[Permission]] = {
    Role.OWNER: frozenset(Permission),
    # An admin may do all but change the tenant itself, so cannot make an owner either.
    Role.ADMIN: frozenset(Permission) - {Permission.TENANT_MANAGE},
    Role.DEVELOPER: DEVELOPER,
    Role.VIEWER: VIEWER,
    Role.BILLING: frozenset({Permission.READ, Permission.USAGE_READ, Permission.LIMITS_MANAGE}),
}
