"""Whose an e-mail address is: each person has one, and somebody has proven it or nobody has."""

from __future__ import annotations

from django.db import transaction

from controlplane.tenants.models import User


@transaction.atomic
def address_set(user: User, *, is_proven: bool) -> None:
    """Let the person's address be the one that mails, resets and sign-ins know; no other is.

    is_proven  they read its mail, their issuer says so, or an operator answers for it
    """
    from allauth.account.models import EmailAddress  # its models need all apps

    EmailAddress.objects.filter(user=user).exclude(email=user.email).delete()
    # What another person's account was known by before theirs was changed.
    EmailAddress.objects.filter(email=user.email).exclude(user=user).delete()
    EmailAddress.objects.update_or_create(
        user=user, email=user.email, defaults={"verified": is_proven, "primary": True}
    )
