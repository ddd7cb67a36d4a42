"""Who there is: tenants, the people in them, and their API keys."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from django.contrib.auth.base_user import BaseUserManager
from django.contrib.auth.models import AbstractUser
from django.core.validators import RegexValidator
from django.db import models

from controlplane.scoping import TenantModel, new_id

#: Names that become part of a URL, a model name or a key: no slash, no colon, no at-sign.
_SLUG = re.compile(r"\A[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?\Z")
SLUG_RULE = (
    "Use 1 to 63 lower-case letters, digits, dots, dashes or underscores; "
    "begin and end with a letter or digit."
)
slug_validator = RegexValidator(_SLUG.pattern, SLUG_RULE)


def is_slug(text: str) -> bool:
    """Whether a stranger's text can be a name, and so whether it may be looked up at all."""
    return bool(_SLUG.match(text))


class Tenant(models.Model):
    """One client of the platform. Not a TenantModel: it is what the others point to."""

    class Status(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"

    id = models.UUIDField(primary_key=True, default=new_id, editable=False)
    slug = models.CharField(max_length=63, unique=True, validators=[slug_validator])
    name = models.CharField(max_length=200)
    status = models.CharField(max_length=16, choices=Status, default=Status.ACTIVE)
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
        # Addresses are stored in lower case; people type them as they like.
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
    """A person's place in a tenant."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role, default=Role.VIEWER)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant", "user"], name="membership_once"),
        ]

    def __str__(self) -> str:
        return f"{self.user_id} {self.role}"


class ApiKey(TenantModel):
    """A credential of the API. Of its secret only an HMAC is kept."""

    public_id = models.CharField(max_length=32, unique=True)
    name = models.CharField(max_length=100)
    secret_hmac = models.BinaryField(max_length=32)
    last4 = models.CharField(max_length=4)
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        indexes = [models.Index(fields=["tenant", "created_at"])]

    def __str__(self) -> str:
        return f"{self.name} (…{self.last4})"
