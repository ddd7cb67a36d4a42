"""Who is asking, and what they may do.

A caller is a `Principal`: an API key (the gateway, /api) or a person with a session (the console,
/api). Both belong to exactly one tenant. `authenticate` takes the Authorization header, as does
`cached_principal`, which asks nobody and so may run in async code; `session_principal` takes a
request with a session; `authorize` is the one place where a role decides.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hmac
import time
from collections.abc import Iterable
from typing import ClassVar

from django.conf import settings
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.request import Request

from controlplane.errors import AuthenticationFailed, PermissionDenied
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants import keys
from controlplane.tenants.key_rules import allows_address
from controlplane.tenants.models import ApiKey, Membership, Role, Tenant, User
from controlplane.tenants.permissions import Permission as Permission
from controlplane.tenants.roles import PERMISSIONS as PERMISSIONS
from controlplane.tenants.second_factor import check_second_factor

#: Where a session keeps the tenant its person works for.
SESSION_TENANT_KEY = "tenant_id"
#: How long another process may go on accepting a key that was just revoked.
CACHE_S = 0.5
_CACHE_MAX_KEYS = 10_000
#: `last_used_at` is written at most this often for each key.
_TOUCH_INTERVAL = dt.timedelta(minutes=1)
#: Compared with when a key has no second secret.
_NO_HMAC = bytes(32)

_WRONG_KEY = "Incorrect API key provided."


#: A key that belongs to nobody in particular does at most what a developer does.
OWNERLESS_KEY_ROLE = Role.DEVELOPER


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller: exactly one of `api_key` and `user` is set."""

    tenant: Tenant
    role: Role
    api_key: ApiKey | None = None
    user: User | None = None
    #: The person's place in the tenant; None for a key.
    membership: Membership | None = None
    #: Django REST framework asks its `request.user` for this.
    is_authenticated: ClassVar[bool] = True

    @property
    def permissions(self) -> frozenset[Permission]:
        """What the role allows and, of a key, its scopes too."""
        return PERMISSIONS[self.role] if self.api_key is None else key_permissions(self.api_key)

    @property
    def label(self) -> str:
        """Who it is, in records: `key:<public id>` or `user:<id>`."""
        if self.api_key is not None:
            return f"key:{self.api_key.public_id}"
        return f"user:{self.user.pk if self.user else ''}"


def authorize(principal: Principal, permission: Permission) -> None:
    """Return if the principal has the permission. Raises PermissionDenied if not."""
    if permission not in principal.permissions:
        whose = "This API key" if principal.api_key else f"The role {principal.role.value}"
        raise PermissionDenied(f"{whose} does not have the permission {permission.value}.")


def authorize_grant(principal: Principal, permissions: Iterable[str]) -> None:
    """Return if the principal may hand these on: nobody gives, or takes, more than they have.

    Raises PermissionDenied if not.
    """
    if missing := sorted(set(permissions) - principal.permissions):
        raise PermissionDenied(f"This needs the permission {missing[0]}.")


def authenticate(header: str | None, address: str = "", *, touches: bool = True) -> Principal:
    """The principal behind an Authorization header that came from an address.

    touches  notes that the key was used; else the caller will, by `touch`
    Raises AuthenticationFailed for a key that is missing, malformed, unknown, expired or revoked,
    PermissionDenied for one of a suspended tenant or from an address that is not on its list.
    """
    parts = _parse_header(header)
    secret_hmac = parts.secret_hmac(settings.API_KEY_PEPPER)
    asked_at = time.monotonic()
    with all_tenants(reason="a key says which tenant it is of"):
        api_key = next(iter(_key_rows(parts)), None)
        if api_key is None or not _matches(api_key, secret_hmac):
            raise AuthenticationFailed(_WRONG_KEY)
        principal = _check_key(api_key, address)
    if touches and touch_is_due(principal):
        touch([principal])
    _remember(principal, asked_at)
    return principal


def standing_principal(api_key: ApiKey) -> Principal:
    """Whom a key stands for, wherever it is used: also for what it asked for some time ago.

    api_key  with its tenant, its owner with the person, and its service account
    Raises AuthenticationFailed for a key that has ended or is a closed account's,
    PermissionDenied for one of a suspended tenant.
    """
    if api_key.revoked_at is not None:
        raise AuthenticationFailed("This API key has been revoked.")
    if api_key.expires_at is not None and api_key.expires_at <= timezone.now():
        raise AuthenticationFailed("This API key has expired.")
    if api_key.owner is not None and not api_key.owner.user.is_active:
        raise AuthenticationFailed("The account that this API key belongs to is closed.")
    _check_tenant(api_key.tenant)
    return Principal(tenant=api_key.tenant, role=_key_role(api_key), api_key=api_key)


def cached_principal(header: str | None, address: str = "") -> Principal | None:
    """`authenticate` without a query: None when the key was not seen in the last `CACHE_S`.

    A secret that is not the cached one is None too: another process may have rotated the key.
    Raises as `authenticate` for what no query is needed to refuse.
    """
    parts = _parse_header(header)
    secret_hmac = parts.secret_hmac(settings.API_KEY_PEPPER)
    cached = _cache.get(parts.public_id)
    if cached is None or cached.until <= time.monotonic():
        return None
    is_same = cached.api_key.environment == parts.environment
    if not (is_same and _matches(cached.api_key, secret_hmac)):
        return None
    return _check_key(cached.api_key, address)


def session_principal(request: HttpRequest) -> Principal | None:
    """The signed-in person and the tenant they work for; None when there is no such pair.

    The tenant is the session's, else the one they joined first. Raises PermissionDenied when it
    is suspended, and as SecondFactorRequired when it asks for one that the person does not have.
    """
    user = request.user
    if not isinstance(user, User) or not user.is_active:
        return None
    with all_tenants(reason="a person says which tenant they work for"):
        memberships = Membership.objects.filter(user=user).select_related("tenant")
        chosen = request.session.get(SESSION_TENANT_KEY)
        if chosen is not None:
            memberships = memberships.filter(tenant_id=chosen)
        membership = memberships.order_by("id").first()
    if membership is None:
        return None
    _check_tenant(membership.tenant)
    check_second_factor(membership.tenant, user)
    return Principal(
        tenant=membership.tenant, role=Role(membership.role), user=user, membership=membership
    )


class ApiKeyAuthentication(BaseAuthentication):
    """Django REST framework's view of `authenticate`. A session is tried only without a header."""

    def authenticate(self, request: Request) -> tuple[Principal, Principal] | None:
        header = request.headers.get("Authorization")
        if header is None:
            return None
        principal = authenticate(header, request.META.get("REMOTE_ADDR") or "")
        return principal, principal

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class ConsoleSessionAuthentication(SessionAuthentication):
    """A person's session; writes need the CSRF token."""

    def authenticate(self, request: Request) -> tuple[Principal, Principal] | None:  # type: ignore[override]
        principal = session_principal(request._request)
        if principal is None:
            return None
        self.enforce_csrf(request)
        return principal, principal


def forget_key(public_id: str) -> None:
    """Drop a key from this process's cache, so that a revocation holds here at once."""
    _cache.pop(public_id, None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Cached:
    api_key: ApiKey
    until: float  # time.monotonic()


_cache: dict[str, _Cached] = {}


def _remember(principal: Principal, asked_at: float) -> None:
    """Keep it for `CACHE_S` from the moment of the question: the answer may have taken its time."""
    assert principal.api_key is not None
    if len(_cache) >= _CACHE_MAX_KEYS:
        _cache.clear()
    entry = _Cached(principal.api_key, asked_at + CACHE_S)
    _cache[principal.api_key.public_id] = entry


def _parse_header(header: str | None) -> keys.KeyParts:
    if not header:
        raise AuthenticationFailed(
            "No API key was provided: send it in the header, as Authorization: Bearer <key>."
        )
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() != "bearer":
        raise AuthenticationFailed(
            "The Authorization header has no key in the form that is read here: send it as "
            "Authorization: Bearer <key>."
        )
    parts = keys.parse(credentials.strip())
    if parts is None:
        raise AuthenticationFailed(_WRONG_KEY)
    return parts


def _key_rows(parts: keys.KeyParts) -> QuerySet[ApiKey]:
    """The key's row, if there is such a key."""
    rows = ApiKey.objects.filter(public_id=parts.public_id, environment=parts.environment)
    return rows.select_related("tenant", "owner__user", "service_account")


def _matches(api_key: ApiKey, secret_hmac: bytes) -> bool:
    """Whether this is the key's secret, or the one before it in its time of grace."""
    is_current = hmac.compare_digest(bytes(api_key.secret_hmac), secret_hmac)
    is_old = hmac.compare_digest(bytes(api_key.old_secret_hmac or _NO_HMAC), secret_hmac)
    until = api_key.old_secret_until
    return is_current or (is_old and until is not None and timezone.now() < until)


def _check_key(api_key: ApiKey, address: str) -> Principal:
    principal = standing_principal(api_key)
    if not allows_address(api_key.allowed_ips, address):
        raise PermissionDenied(
            "This API key may not be used from your address.", code="address_not_allowed"
        )
    return principal


def key_permissions(api_key: ApiKey) -> frozenset[Permission]:
    """What a key can do: its scopes, as far as its owner's role allows them."""
    return frozenset(map(Permission, api_key.scopes)) & PERMISSIONS[_key_role(api_key)]


def _key_role(api_key: ApiKey) -> Role:
    holder = api_key.owner or api_key.service_account
    return OWNERLESS_KEY_ROLE if holder is None else Role(holder.role)


def _check_tenant(tenant: Tenant) -> None:
    if tenant.status != Tenant.Status.ACTIVE:
        raise PermissionDenied(f"{tenant.name} is suspended.", code="tenant_suspended")


def touch_is_due(principal: Principal) -> bool:
    """Whether a key's last use was noted so long ago that this one has to be."""
    assert principal.api_key is not None
    last = principal.api_key.last_used_at
    return last is None or last < timezone.now() - _TOUCH_INTERVAL


def touch(principals: Iterable[Principal]) -> None:
    """Note that their keys are used now, where nobody did meanwhile. Raises django.db.Error."""
    now = timezone.now()
    is_due = Q(last_used_at=None) | Q(last_used_at__lt=now - _TOUCH_INTERVAL)
    used = [principal.api_key.pk for principal in principals if principal.api_key is not None]
    with all_tenants(reason="keys of many tenants are used"):
        ApiKey.objects.filter(is_due, pk__in=used).update(last_used_at=now)
