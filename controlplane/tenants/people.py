"""All changes to members, invites and service accounts. They run in the tenant's scope.

Nobody grants more than they have: to change a role, the caller needs every permission of the new
role and of the old one, and must not be a key with restrictions that a person does not have.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
import uuid

from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.errors import Conflict, InvalidRequest, NotFound, from_validation, require
from controlplane.events.audit.services import record
from controlplane.tenancy.scoping import all_tenants, current_tenant_id, tenant_scope
from controlplane.tenants.auth import Principal, authorize_grant
from controlplane.tenants.key_grants import as_it_is_now, check_unbound
from controlplane.tenants.key_services import api_key_revoke
from controlplane.tenants.models import (
    ApiKey,
    Invite,
    Membership,
    Role,
    ServiceAccount,
    Tenant,
    User,
)
from controlplane.tenants.permissions import Permission
from controlplane.tenants.roles import PERMISSIONS

INVITE_LIFETIME = dt.timedelta(days=7)
_NO_INVITE = "This invite does not exist, has been used, or has expired."
#: Most pending invites of a tenant: bounds the mail that a stolen key can send.
MAX_PENDING_INVITES = 1000


def member_get(*, member_id: uuid.UUID) -> Membership:
    """Return the member. Raises NotFound."""
    found = Membership.objects.select_related("user").filter(pk=member_id).first()
    return require(found, "There is no such member.")


@transaction.atomic
def member_role_set(*, by: Principal, member_id: uuid.UUID, role: Role) -> Membership:
    """Set a member's role.

    Raises NotFound, PermissionDenied; Conflict for the last owner or the last who manages members.
    """
    member, others = _lock_with_managers(member_id)
    authorize_grant(by, PERMISSIONS[Role(member.role)] | PERMISSIONS[role])
    if PERMISSIONS[role] - PERMISSIONS[Role(member.role)]:
        check_unbound(as_it_is_now(by))
    _check_dispensable(member, others, PERMISSIONS[role])
    before = {"role": member.role}
    member.role = role
    member.save(update_fields=["role"])
    record("changed", member, before=before, after={"user": member.user.email, "role": role})
    return member


@transaction.atomic
def member_remove(*, by: Principal, member_id: uuid.UUID) -> None:
    """End a membership and revoke the keys it owns; the person remains a user.

    Raises NotFound, PermissionDenied; Conflict for the last owner or the last who manages members.
    """
    member, others = _lock_with_managers(member_id)
    authorize_grant(by, PERMISSIONS[Role(member.role)])
    _check_dispensable(member, others, frozenset())
    _revoke_keys_of(member)
    record("deleted", member, before={"user": member.user.email, "role": member.role})
    member.delete()


@transaction.atomic
def invite_create(*, by: Principal, email: str, role: Role) -> tuple[Invite, str]:
    """Make an invite. -> the invite and its token, which cannot be read again.

    Raises InvalidRequest, PermissionDenied; Conflict for a person who is a member or invited.
    """
    authorize_grant(by, PERMISSIONS[role])
    check_unbound(as_it_is_now(by))
    email = email.strip().lower()
    try:
        validate_email(email)
    except ValidationError as error:
        raise InvalidRequest("This is not an e-mail address.", param="email") from error
    if Membership.objects.filter(user__email=email).exists():
        raise Conflict("This person is already a member.", param="email")
    pending = Invite.objects.filter(
        accepted_at=None, revoked_at=None, expires_at__gt=timezone.now()
    )
    if pending.filter(email=email).exists():
        raise Conflict("This person is already invited. Revoke that invite first.", param="email")
    if pending.count() >= MAX_PENDING_INVITES:
        raise Conflict("There are too many pending invites: revoke some of them.")
    token = secrets.token_urlsafe(32)
    invite = Invite.objects.create(
        email=email,
        role=role,
        token_sha256=_token_hash(token),
        invited_by=by.user,
        expires_at=timezone.now() + INVITE_LIFETIME,
    )
    record("created", invite, after={"email": email, "role": role})
    return invite, token


def invite_get(*, invite_id: uuid.UUID) -> Invite:
    """Return the invite. Raises NotFound."""
    return require(Invite.objects.filter(pk=invite_id).first(), "There is no such invite.")


@transaction.atomic
def invite_revoke(*, invite_id: uuid.UUID) -> Invite:
    """Revoke an invite; doing it again changes nothing. Raises NotFound; Conflict if accepted."""
    pending = Invite.objects.filter(pk=invite_id, accepted_at=None, revoked_at=None)
    num_revoked = pending.update(revoked_at=timezone.now())
    invite = invite_get(invite_id=invite_id)
    if num_revoked:
        record("revoked", invite, after={"email": invite.email})
    if invite.accepted_at is not None:
        raise Conflict("This invite has been accepted. Remove the member instead.")
    return invite


def invite_find(*, token: str) -> tuple[Invite, Tenant]:
    """Return the pending invite with this token, and its tenant.

    Raises the same NotFound for an unknown, used, revoked or expired token.
    """
    with all_tenants(reason="an invite's token says which tenant it belongs to"):
        rows = Invite.objects.select_related("tenant")
        invite = rows.filter(token_sha256=_token_hash(token[:200])).first()
    if (
        invite is None
        or invite.status != Invite.Status.PENDING
        or invite.tenant.status != Tenant.Status.ACTIVE
    ):
        raise NotFound(_NO_INVITE)
    return invite, invite.tenant


@transaction.atomic
def invite_accept(*, token: str, user: User) -> Membership:
    """Make the invited person a member; the invite is then used.

    Raises NotFound like `invite_find`, and for a person with another address; Conflict for a
    member.
    """
    invite, tenant = invite_find(token=token)
    if user.email != invite.email:
        raise NotFound(_NO_INVITE)
    with tenant_scope(tenant.id):
        unused = Invite.objects.filter(pk=invite.pk, accepted_at=None, revoked_at=None)
        if unused.update(accepted_at=timezone.now()) == 0:
            raise NotFound(_NO_INVITE)
        membership, is_new = Membership.objects.get_or_create(
            user=user, defaults={"role": invite.role}
        )
        if not is_new:
            raise Conflict("You are already a member.")
        record("accepted", invite, after={"user": user.email})
        record("created", membership, after={"user": user.email, "role": membership.role})
    return membership


def service_account_get(*, account_id: uuid.UUID) -> ServiceAccount:
    """Return the service account. Raises NotFound."""
    found = ServiceAccount.objects.filter(pk=account_id).first()
    return require(found, "There is no such service account.")


@transaction.atomic
def service_account_create(
    *, by: Principal, name: str, role: Role, description: str = ""
) -> ServiceAccount:
    """Make an account. Raises InvalidRequest, PermissionDenied; Conflict for a taken name."""
    authorize_grant(by, PERMISSIONS[role])
    account = ServiceAccount(
        tenant_id=current_tenant_id(), name=name, role=role, description=description
    )
    try:
        account.full_clean(validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        raise from_validation(error) from error
    found, is_new = ServiceAccount.objects.get_or_create(
        name=name, defaults={"role": role, "description": description}
    )
    if not is_new:
        raise Conflict(f"The service account {name} already exists.", param="name")
    record("created", found, after={"name": name, "role": role, "description": description})
    return found


@transaction.atomic
def service_account_update(
    *, by: Principal, account_id: uuid.UUID, role: Role, description: str
) -> ServiceAccount:
    """Change role and description. Raises NotFound, PermissionDenied."""
    account = service_account_get(account_id=account_id)
    authorize_grant(by, PERMISSIONS[Role(account.role)] | PERMISSIONS[role])
    before = {"role": account.role, "description": account.description}
    account.role, account.description = role, description
    account.save(update_fields=["role", "description"])
    record("changed", account, before=before, after={"role": role, "description": description})
    return account


@transaction.atomic
def service_account_delete(*, by: Principal, account_id: uuid.UUID) -> None:
    """End a service account and revoke its keys. Raises NotFound, PermissionDenied."""
    account = service_account_get(account_id=account_id)
    authorize_grant(by, PERMISSIONS[Role(account.role)])
    _revoke_keys_of(account)
    record("deleted", account, before={"name": account.name, "role": account.role})
    account.delete()


def _revoke_keys_of(owner: Membership | ServiceAccount) -> None:
    """Revoke an owner's keys. The rows stay, without owner: records of their use refer to them.

    Keys that these keys made for a service account stay valid: they outlive people.
    """
    field = "owner" if isinstance(owner, Membership) else "service_account"
    owned = ApiKey.objects.filter(**{field: owner})
    for public_id in list(owned.values_list("public_id", flat=True)):
        api_key_revoke(public_id=public_id, with_children=False)
    owned.update(**{field: None})


def _lock_with_managers(member_id: uuid.UUID) -> tuple[Membership, list[Membership]]:
    """Return a member and the others who manage members, locked until the transaction ends.

    Rows are locked in a fixed order, so that two owners cannot remove each other at the same time.
    A closed account does not count. Raises NotFound.
    """
    managing = [role for role in Role if Permission.MEMBERS_MANAGE in PERMISSIONS[role]]
    wanted = Q(pk=member_id) | Q(role__in=managing)
    rows = Membership.objects.select_for_update(of=("self",)).select_related("user")
    found = list(rows.filter(wanted).order_by("pk"))
    member = next((row for row in found if row.pk == member_id), None)
    member = require(member, "There is no such member.")
    return member, [row for row in found if row.pk != member_id and row.user.is_active]


def _check_dispensable(
    member: Membership, others: list[Membership], kept: frozenset[Permission]
) -> None:
    """Raise Conflict if the member keeps only `kept` and nobody else has what is lost."""
    lost = PERMISSIONS[Role(member.role)] - kept
    if Permission.TENANT_MANAGE in lost and all(row.role != Role.OWNER for row in others):
        raise Conflict("A tenant needs an owner. Make another member an owner first.")
    if Permission.MEMBERS_MANAGE in lost and not others:
        raise Conflict(
            "Nobody else manages this tenant's members. Make another member an admin first."
        )


def _token_hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
