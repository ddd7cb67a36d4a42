"""Tenants, the people in them, and their API keys."""

from __future__ import annotations

import re
import uuid
from typing import Any, ClassVar

from django.contrib.auth.base_user import BaseUserManager
from django.contrib.auth.models import AbstractUser
from django.core.validators import RegexValidator
from django.db import models
from django.utils import timezone

from controlplane.tenancy.scoping import TenantModel, new_id
from controlplane.tenants.permissions import DEFAULT_SCOPES

#: A slug may become part of a URL, a model name or a key: no slash, no colon, no at sign.
_SLUG = re.compile(r"\A[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?\Z")
#: Takes the place of a key's missing second secret in the comparison.
_NO_HMAC = bytes(32)
SLUG_RULE = (
    "Use 1 to 63 lower-case letters, digits, dots, dashes or underscores; "
    "begin and end with a letter or digit."
)
slug_validator = RegexValidator(_SLUG.pattern, SLUG_RULE)


def is_slug(text: str) -> bool:
    """Return whether untrusted text has the form of a slug, and so may be looked up."""
    return bool(_SLUG.match(text))


def _default_scopes() -> list[str]:
    return list(DEFAULT_SCOPES)


class Tenant(models.Model):
    """One client of the platform. Not a TenantModel: TenantModels point to it."""

    class Status(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"
        DELETING = "deleting"  # it can still be restored, or its data is being deleted
        DELETED = "deleted"  # only this row is left, without its name

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    slug = models.CharField(max_length=63, unique=True, validators=[slug_validator])
    name = models.CharField(max_length=200)
    status = models.CharField(max_length=16, choices=Status, default=Status.ACTIVE)
    #: Members must sign in with a second factor; keys are not affected.
    requires_second_factor = models.BooleanField(default=False)
    #: Origins of pages that may call the gateway from a browser, as browsers write them.
    allowed_origins = models.JSONField(default=list, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.slug


class UserManager(BaseUserManager["User"]):
    use_in_migrations = True

    def create_user(self, email: str, password: str | None = None, **fields: Any) -> User:
        user = self.model(email=self.normalize_email(email).lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user

    def get_by_natural_key(self, username: str | None) -> User:
        # Addresses are stored in lower case; people may type capitals.
        return super().get_by_natural_key((username or "").strip().lower())

    def create_superuser(self, email: str, password: str | None = None, **fields: Any) -> User:
        return self.create_user(email, password, is_staff=True, is_superuser=True, **fields)


class User(AbstractUser):
    """A person. Signs in with an e-mail address; operators have `is_staff`."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    username = None  # type: ignore[assignment]
    email = models.EmailField(unique=True)

    USERNAME_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    objects: ClassVar[UserManager] = UserManager()  # type: ignore[assignment]

    def __str__(self) -> str:
        return self.email


class Role(models.TextChoices):
    OWNER = "owner"
    ADMIN = "admin"
    DEVELOPER = "developer"
    VIEWER = "viewer"
    BILLING = "billing"


class Membership(TenantModel):
    """A person's role in a tenant."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role, default=Role.VIEWER)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "user"], name="membership_once"),
        ]

    def __str__(self) -> str:
        return f"{self.user.email} in {self.tenant.slug}"


class ServiceAccount(TenantModel):
    """A program's role in a tenant: its keys outlive the people who made them."""

    name = models.CharField(max_length=63, validators=[slug_validator])
    description = models.CharField(max_length=500, blank=True)
    role = models.CharField(max_length=16, choices=Role, default=Role.DEVELOPER)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "name"], name="service_account_name_once"),
        ]

    def __str__(self) -> str:
        return self.name


class Invite(TenantModel):
    """An offer of a membership to the holder of a token; only the token's hash is stored."""

    class Status(models.TextChoices):
        PENDING = "pending"
        ACCEPTED = "accepted"
        REVOKED = "revoked"
        EXPIRED = "expired"

    email = models.EmailField()
    role = models.CharField(max_length=16, choices=Role)
    token_sha256 = models.CharField(max_length=64, unique=True)
    invited_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    expires_at = models.DateTimeField()
    accepted_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["tenant", "created_at"])]

    def __str__(self) -> str:
        return f"{self.email} {self.role}"

    @property
    def status(self) -> Status:
        if self.accepted_at is not None:
            return self.Status.ACCEPTED
        if self.revoked_at is not None:
            return self.Status.REVOKED
        is_late = self.expires_at <= timezone.now()
        return self.Status.EXPIRED if is_late else self.Status.PENDING


class Credential(models.Model):
    """A key's text as stored: only an HMAC of its secret."""

    public_id = models.CharField(max_length=32, unique=True)
    name = models.CharField(max_length=100)
    secret_hmac = models.BinaryField(max_length=32)
    last4 = models.CharField(max_length=4)
    #: The secret before the last rotation, and the time until which it works.
    old_secret_hmac = models.BinaryField(max_length=32, null=True)
    old_secret_until = models.DateTimeField(null=True, blank=True)
    #: `ciphers.pepper_id` of the pepper of each HMAC; empty: not used since this was recorded.
    pepper_id = models.CharField(max_length=16, blank=True, default="", db_default="")
    old_pepper_id = models.CharField(max_length=16, blank=True, default="", db_default="")
    #: Networks; an empty list allows all.
    allowed_ips = models.JSONField(default=list, blank=True)
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.name} (…{self.last4})"


class ApiKey(Credential, TenantModel):
    """A credential of the API.

    It can do what both its scopes and its owner's role allow. Its owner is a member, a service
    account or, for keys that the operator made, the tenant itself.
    """

    class Environment(models.TextChoices):
        LIVE = "live"
        TEST = "test"

    environment = models.CharField(max_length=8, choices=Environment, default=Environment.LIVE)
    #: Values of `controlplane.tenants.permissions.Permission`.
    scopes = models.JSONField(default=_default_scopes)
    #: Names of models; an empty list allows all.
    allowed_models = models.JSONField(default=list, blank=True)
    owner = models.ForeignKey(
        Membership, null=True, blank=True, on_delete=models.CASCADE, related_name="keys"
    )
    service_account = models.ForeignKey(
        ServiceAccount, null=True, blank=True, on_delete=models.CASCADE, related_name="keys"
    )
    #: The key that made it, and the ids of all its ancestors, the oldest first.
    parent = models.ForeignKey(
        "self", null=True, blank=True, on_delete=models.SET_NULL, related_name="children"
    )
    ancestors = models.JSONField(default=list, blank=True)

    class Meta:
        indexes = [models.Index(fields=["tenant", "created_at"])]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(owner=None) | models.Q(service_account=None),
                name="api_key_has_one_owner",
            ),
        ]

    @property
    def line(self) -> list[uuid.UUID]:
        """The ids of its ancestors and its own: the limits of each of them apply."""
        return [*map(uuid.UUID, self.ancestors), self.id]

    @classmethod
    def made_by(cls, api_key_id: uuid.UUID) -> models.QuerySet[ApiKey]:
        """Return all descendants of a key of the tenant in scope."""
        return cls.objects.filter(ancestors__contains=[str(api_key_id)])


class KeptAnswer(models.Model):
    """The response to a write with an Idempotency-Key, for repetitions.

    It may contain a secret that is shown once, so it is encrypted with the Idempotency-Key; only a
    hash of that key is stored.
    """

    caller = models.CharField(max_length=64)
    route = models.CharField(max_length=500)
    key_sha256 = models.CharField(max_length=64)
    body_sha256 = models.CharField(max_length=64)
    status = models.PositiveSmallIntegerField(default=0)
    answer = models.BinaryField(default=bytes)
    expires_at = models.DateTimeField(db_index=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return self.route


class IdempotencyRecord(KeptAnswer, TenantModel):
    """The response to a tenant's caller."""

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "caller", "route", "key_sha256"], name="idempotency_key_once"
            ),
        ]


class OperatorIdempotencyRecord(KeptAnswer):
    """The response to an operator; it belongs to no tenant."""

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["caller", "route", "key_sha256"], name="operator_idempotency_key_once"
            ),
        ]
