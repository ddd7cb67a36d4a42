"""Record sign-ins, second factors and passwords in the audit trails of the person's tenants."""

from __future__ import annotations

from typing import Any

from allauth.account import signals as account
from allauth.mfa import signals as mfa
from allauth.mfa.models import Authenticator
from allauth.socialaccount import signals as social
from allauth.usersessions.models import UserSession
from django.db import transaction
from django.http import HttpRequest

from controlplane.events.audit.services import record
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants.email_addresses import address_set
from controlplane.tenants.models import Membership, User


@transaction.atomic
def record_for_person(action: str, user: User, **after: Any) -> None:
    """Record an event for each tenant of the person; without tenants, in the platform's trail."""
    with all_tenants(reason="a person's sign-in concerns each of their tenants"):
        rows = Membership.objects.filter(user=user).order_by("tenant_id")
        tenant_ids = list(rows.values_list("tenant_id", flat=True))
    after = {"user": user.email, **after}
    for tenant_id in tenant_ids:
        with tenant_scope(tenant_id):
            record(action, user, after=after)
    if not tenant_ids:
        record(action, user, after=after)


@transaction.atomic
def second_factors_remove(user: User) -> None:
    """Remove all second factors of a person who has lost them, and end their sessions."""
    Authenticator.objects.filter(user=user).delete()
    for session in UserSession.objects.filter(user=user):
        session.end()
    record_for_person("second_factor_removed", user, type="all")


def connect() -> None:
    """Connect to allauth's signals; called once, when all apps are loaded."""
    account.user_logged_in.connect(_signed_in)
    account.password_changed.connect(_password_changed)
    account.password_set.connect(_password_changed)
    account.password_reset.connect(_password_reset)
    mfa.authenticator_added.connect(_factor_added)
    mfa.authenticator_removed.connect(_factor_removed)
    mfa.authenticator_reset.connect(_codes_made)
    social.social_account_added.connect(_issuer_linked)


def _signed_in(request: HttpRequest, user: User, **_: Any) -> None:
    records = request.session.get("account_authentication_methods", [])
    methods = [str(row.get("type") or row.get("method")) for row in records]
    record_for_person("signed_in", user, methods=list(dict.fromkeys(methods)))


def _password_changed(user: User, **_: Any) -> None:
    record_for_person("password_changed", user)


def _password_reset(user: User, **_: Any) -> None:
    address_set(user, is_proven=True)  # they read the mail
    record_for_person("password_changed", user)


def _factor_added(request: HttpRequest, user: User, authenticator: Any, **_: Any) -> None:
    record_for_person("second_factor_added", user, type=authenticator.type)
    if authenticator.type != authenticator.Type.RECOVERY_CODES:
        # The other sessions were opened without it.
        others = UserSession.objects.filter(user=user)
        for session in others.exclude(session_key=request.session.session_key):
            session.end()


def _factor_removed(user: User, authenticator: Any, **_: Any) -> None:
    record_for_person("second_factor_removed", user, type=authenticator.type)


def _codes_made(user: User, authenticator: Any, **_: Any) -> None:
    record_for_person("second_factor_renewed", user, type=authenticator.type)


def _issuer_linked(sociallogin: Any, **_: Any) -> None:
    proven = {address.email for address in sociallogin.email_addresses if address.verified}
    if sociallogin.user.email in proven:
        address_set(sociallogin.user, is_proven=True)
    record_for_person("issuer_linked", sociallogin.user, issuer=sociallogin.account.provider)
