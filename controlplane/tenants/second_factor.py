"""Second factors: people who have one, and who need one (operators, some tenants' members)."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.db.models import QuerySet

from controlplane.errors import PermissionDenied
from controlplane.tenants.models import Membership, Tenant, User


class SecondFactorRequired(PermissionDenied):
    """Raised when the tenant requires a second factor and the person has none."""

    def __init__(self, tenant: Tenant) -> None:
        super().__init__(
            f"{tenant.name} requires a second factor. Set one up in the console, under Security.",
            code="second_factor_required",
        )
        self.tenant = tenant


def authenticators(user: User) -> QuerySet[Any]:
    """Return the person's second factors; recovery codes alone do not count."""
    from allauth.mfa.models import Authenticator  # its models need all apps

    types = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)
    found: QuerySet[Any] = Authenticator.objects.filter(user_id=user.pk, type__in=types)
    return found


def check_second_factor(tenant: Tenant, user: User) -> None:
    """Raise SecondFactorRequired for a person without one in a tenant that requires it."""
    if tenant.requires_second_factor and not authenticators(user).exists():
        raise SecondFactorRequired(tenant)


def is_kept_out(operator: User) -> bool:
    """Return whether the operator must set up a second factor before using /admin."""
    return settings.OPERATORS_NEED_SECOND_FACTOR and not authenticators(operator).exists()


def members_without() -> list[str]:
    """Return the addresses of the members of the tenant in scope without a second factor."""
    from allauth.mfa.models import Authenticator

    types = (Authenticator.Type.TOTP, Authenticator.Type.WEBAUTHN)
    having = Authenticator.objects.filter(type__in=types).values("user_id")
    rows = Membership.objects.exclude(user_id__in=having).order_by("user__email")
    return list(rows.values_list("user__email", flat=True))
