"""Functions that the commands of this folder share."""

import sys

from django.core.management.base import CommandError

from controlplane.tenants.models import Tenant


def find_tenant(slug: str) -> Tenant:
    """Return the tenant. Raises CommandError when there is none."""
    tenant = Tenant.objects.filter(slug=slug).first()
    if tenant is None:
        raise CommandError(f"there is no tenant {slug}: create it with tenant_create")
    return tenant


def read_password() -> str:
    """Return the first line of standard input. Raises CommandError when it is empty."""
    password = sys.stdin.readline().rstrip("\r\n")
    if not password:
        raise CommandError("no password on standard input")
    return password
