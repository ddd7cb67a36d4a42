"""The only e-mail address of a person, verified or not."""

from __future__ import annotations

from django.db import transaction

from controlplane.tenants.models import User


@transaction.atomic
def address_set(user: User, *, is_proven: bool) -> None:
    """Make `user.email` the person's only address for mail, password resets and sign-ins.

    is_proven  whether they read its mail, their issuer confirms it, or an operator vouches for it
    """
    from allauth.account.models import EmailAddress  # its models need all apps

    EmailAddress.objects.filter(user=user).exclude(email=user.email).delete()
    # Another account may have had this address earlier.
    EmailAddress.objects.filter(email=user.email).exclude(user=user).delete()
    EmailAddress.objects.update_or_create(
        user=user, email=user.email, defaults={"verified": is_proven, "primary": True}
    )
