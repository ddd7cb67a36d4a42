"""All changes to tenants and people. What belongs to a tenant runs in its scope.

Changes to keys are in `key_services`, changes to invites and service accounts in `people`.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import transaction

from controlplane.errors import Conflict, InvalidRequest, from_validation
from controlplane.events.audit.services import record
from controlplane.tenants.email_addresses import address_set
from controlplane.tenants.key_services import api_key_create as api_key_create
from controlplane.tenants.key_services import api_key_revoke as api_key_revoke
from controlplane.tenants.models import Membership, Role, Tenant, User
from controlplane.tenants.origins import checked_origins

#: The states that an operator sets; deletion sets the others.
SETTABLE = (Tenant.Status.ACTIVE, Tenant.Status.SUSPENDED)


@transaction.atomic
def tenant_create(*, slug: str, name: str) -> Tenant:
    """Make a tenant. Raises InvalidRequest for a bad slug or name, Conflict for a taken slug."""
    tenant = Tenant(slug=slug, name=name)
    try:
        tenant.full_clean(validate_unique=False)
    except ValidationError as error:
        raise from_validation(error) from error
    # get_or_create, because a failed INSERT would abort the caller's transaction.
    tenant, is_new = Tenant.objects.get_or_create(slug=slug, defaults={"name": name})
    if not is_new:
        raise Conflict(f"The tenant {slug} already exists.", param="slug")
    record("created", tenant, after={"slug": slug, "name": name})
    return tenant


@transaction.atomic
def tenant_update(
    *,
    tenant: Tenant,
    name: str | None = None,
    requires_second_factor: bool | None = None,
    allowed_origins: Sequence[str] | None = None,
) -> Tenant:
    """Change the given fields.

    Raises InvalidRequest for an invalid name or origin, Conflict while it is being deleted.
    """
    wanted: dict[str, object] = {}
    if name is not None:
        wanted["name"] = name.strip()
    if requires_second_factor is not None:
        wanted["requires_second_factor"] = requires_second_factor
    if allowed_origins is not None:
        wanted["allowed_origins"] = checked_origins(allowed_origins)
    tenant = Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)
    check_not_deleting(tenant)
    changed = {field: new for field, new in wanted.items() if getattr(tenant, field) != new}
    before = {field: getattr(tenant, field) for field in changed}
    for field, new in changed.items():
        setattr(tenant, field, new)
    try:
        tenant.clean_fields(exclude=["id"])
    except ValidationError as error:
        raise from_validation(error) from error
    if changed:
        tenant.save(update_fields=list(changed))
        record("changed", tenant, before=before, after=changed)
    return tenant


@transaction.atomic
def tenant_status_set(*, tenant: Tenant, status: str) -> Tenant:
    """Suspend or reactivate: a suspended tenant's keys and people are refused within a second.

    Raises InvalidRequest for a state that only deletion sets, Conflict for a tenant that is being
    deleted.
    """
    if status not in SETTABLE:
        raise InvalidRequest("status must be active or suspended.", param="status")
    locked = Tenant.objects.select_for_update(no_key=True).get(pk=tenant.pk)
    check_not_deleting(locked)
    before = locked.status
    tenant.status = Tenant.Status(status)
    if before != tenant.status:
        tenant.save(update_fields=["status"])
        record("status_set", tenant, before={"status": before}, after={"status": tenant.status})
    return tenant


def check_not_deleting(tenant: Tenant) -> None:
    """Raise Conflict for a tenant that is being deleted: nobody changes or adds anything to it."""
    if tenant.status in (Tenant.Status.DELETING, Tenant.Status.DELETED):
        raise Conflict(
            f"{tenant.slug} is being deleted. Restore it first.", code="tenant_being_deleted"
        )


@transaction.atomic
def user_create(
    *, email: str, password: str | None, is_operator: bool = False, is_proven: bool = False
) -> User:
    """Make a person, who can sign in if there is a password.

    is_proven  whether the address is known to be theirs: only then may they set up a second
               factor, or a stranger could register the address first and lock its owner out

    Raises InvalidRequest for an invalid address or a weak password, Conflict for a known address.
    """
    email = email.strip().lower()
    user = User(email=email, is_staff=is_operator, is_superuser=is_operator)
    try:
        user.clean_fields(exclude=["password"])
    except ValidationError as error:
        raise from_validation(error) from error
    if password is not None:
        password_check(password, user)
    user.set_password(password)
    user, is_new = User.objects.get_or_create(
        email=email,
        defaults={
            "password": user.password,
            "is_staff": is_operator,
            "is_superuser": is_operator,
        },
    )
    if not is_new:
        raise Conflict(f"The user {email} already exists.", param="email")
    address_set(user, is_proven=is_proven)
    record("created", user, after={"email": email, "is_operator": is_operator})
    return user


@transaction.atomic
def user_password_set(*, user: User, password: str) -> None:
    """Set a password and end the person's sessions. Raises InvalidRequest for a weak one."""
    password_check(password, user)
    user.set_password(password)
    user.save(update_fields=["password"])
    record("password_set", user)


@transaction.atomic
def member_add(*, email: str, role: Role, password: str | None = None) -> Membership:
    """Give a person a role in the tenant in scope; an existing member gets the new role.

    A new person is made, with `password`; the caller vouches for the address. The password of an
    existing person stays: no tenant may change it.
    """
    user = User.objects.filter(email=email.strip().lower()).first()
    if user is None:
        user = user_create(email=email, password=password, is_proven=True)
    known = Membership.objects.select_for_update().filter(user=user).first()
    before = {"role": known.role} if known else None
    membership, is_new = Membership.objects.update_or_create(user=user, defaults={"role": role})
    if is_new or before != {"role": role}:
        after = {"user": user.email, "role": role}
        record("created" if is_new else "changed", membership, before=before, after=after)
    return membership


def password_check(password: str, user: User) -> None:
    """Raise InvalidRequest for a password that is too weak for the person."""
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise InvalidRequest(" ".join(error.messages), param="password") from error
