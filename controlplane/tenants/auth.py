"""Authentication and authorization: who the caller is, and what they may do.

A caller is a `Principal`: an API key (the gateway, /api) or a person with a session (the console,
/api). Both belong to exactly one tenant. `authenticate` reads the Authorization header, as does
`find_principal` in async code, mostly from memory; `session_principal` reads a request's session;
`authorize` is the only place that compares permissions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Iterable, Iterator
from typing import ClassVar

from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.request import Request

from controlplane.errors import ApiError, AuthenticationFailed, PermissionDenied
from controlplane.tenancy import epochs
from controlplane.tenancy.lookup import Lookup
from controlplane.tenancy.model_scope import Bounds, model_scope
from controlplane.tenancy.scoping import all_tenants, tenant_scope
from controlplane.tenants import keys, pepper_change
from controlplane.tenants.key_rules import allows_address
from controlplane.tenants.models import ApiKey, Membership, Role, Tenant, User
from controlplane.tenants.permissions import OF_ALL_MODELS
from controlplane.tenants.permissions import Permission as Permission
from controlplane.tenants.roles import PERMISSIONS as PERMISSIONS
from controlplane.tenants.second_factor import check_second_factor

#: The session's entry for the tenant that its person works for.
SESSION_TENANT_KEY = "tenant_id"
#: How long another process may still accept a revoked key.
CACHE_S = 0.5
#: `last_used_at` is written at most this often for each key.
_TOUCH_INTERVAL = dt.timedelta(minutes=1)

_WRONG_KEY = "Incorrect API key provided."
#: Keys that were let in, by public id.
_keys: Lookup[str, ApiKey] = Lookup(fresh_s=CACHE_S, max_entries=10_000)

#: The role of a key that belongs to no person and no service account.
OWNERLESS_KEY_ROLE = Role.DEVELOPER


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated caller: exactly one of `api_key` and `user` is set."""

    tenant: Tenant
    role: Role
    api_key: ApiKey | None = None
    user: User | None = None
    #: The person's membership in the tenant; None for a key.
    membership: Membership | None = None
    #: Django REST framework reads this from `request.user`.
    is_authenticated: ClassVar[bool] = True

    @property
    def permissions(self) -> frozenset[Permission]:
        """The permissions of the role; for a key, only those that its scopes allow, too."""
        return PERMISSIONS[self.role] if self.api_key is None else key_permissions(self.api_key)

    @property
    def log_fields(self) -> dict[str, str]:
        """The caller's fields in log lines."""
        return {
            "tenant_id": str(self.tenant.id),
            "tenant": self.tenant.slug,
            "caller": self.label,
        }

    @property
    def label(self) -> str:
        """The caller's name in records: `key:<public id>` or `user:<id>`."""
        if self.api_key is not None:
            return f"key:{self.api_key.public_id}"
        return f"user:{self.user.pk if self.user else ''}"


def authorize(principal: Principal, permission: Permission) -> None:
    """Return if the principal has the permission. Raises PermissionDenied if not."""
    if permission not in principal.permissions:
        whose = "This API key" if principal.api_key else f"The role {principal.role.value}"
        why = ""
        if principal.api_key and principal.api_key.allowed_models and permission in OF_ALL_MODELS:
            why = " It concerns all models, and the key has allowed_models."
        raise PermissionDenied(f"{whose} does not have the permission {permission.value}.{why}")


@contextlib.contextmanager
def caller_scope(principal: Principal) -> Iterator[None]:
    """Act for a caller: in their tenant, and on the models that their key may name."""
    api_key = principal.api_key
    bounds = None
    if api_key is not None and api_key.allowed_models:
        bounds = Bounds(tuple(api_key.allowed_models), api_key.pk)
    with tenant_scope(principal.tenant.id), model_scope(bounds):
        yield


def authorize_grant(principal: Principal, permissions: Iterable[str]) -> None:
    """Return if the principal may grant or revoke these: they must have them all.

    Raises PermissionDenied if not.
    """
    if missing := sorted(set(permissions) - principal.permissions):
        raise PermissionDenied(f"This needs the permission {missing[0]}.")


def authenticate(header: str | None, address: str = "", *, touches: bool = True) -> Principal:
    """Return the principal of an Authorization header that came from `address`.

    touches  notes that the key was used; if False, the caller must call `touch`
    Raises AuthenticationFailed for a key that is missing, malformed, unknown, expired or revoked,
    PermissionDenied for a suspended tenant's key, or an address that the key does not allow.
    """
    parts = _parse_header(header)
    asked = epochs.stamp()
    with all_tenants(reason="a key says which tenant it is of"):
        api_key = next(iter(_key_rows(parts)), None)
        secret = None if api_key is None else pepper_change.matching(api_key, parts)
        if api_key is None or secret is None:
            raise AuthenticationFailed(_WRONG_KEY)
        principal = _check_key(api_key, address)
        pepper_change.renew(api_key, parts, secret)
    if touches and touch_is_due(principal):
        touch([principal])
    _keys.put(api_key.public_id, api_key, asked, api_key.tenant_id)
    return principal


def standing_principal(api_key: ApiKey) -> Principal:
    """Return the principal of a stored key, for work that it asked for earlier, too.

    api_key  with its tenant, its owner's user, and its service account loaded
    Raises AuthenticationFailed for a revoked or expired key and for one of a closed account,
    PermissionDenied for a suspended tenant's key.
    """
    if api_key.revoked_at is not None:
        raise AuthenticationFailed("This API key has been revoked.")
    if api_key.expires_at is not None and api_key.expires_at <= timezone.now():
        raise AuthenticationFailed("This API key has expired.")
    if api_key.owner is not None and not api_key.owner.user.is_active:
        raise AuthenticationFailed("The account that this API key belongs to is closed.")
    _check_tenant(api_key.tenant)
    return Principal(tenant=api_key.tenant, role=_key_role(api_key), api_key=api_key)


async def find_principal(header: str | None, address: str = "") -> Principal:
    """Do as `authenticate`, without a query for a key that was let in within `CACHE_S`.

    A secret that differs from the cached one needs the query, too: another process may have
    rotated the key. While the database is away, a key that it knew lately is let in. The caller
    must call `touch`.
    """
    parts = _parse_header(header)
    return await _keys.find(
        [parts.public_id],
        lambda found: _let_in(found[0], parts, address),
        lambda: authenticate(header, address, touches=False),
    )


def tenant_known(header: str | None, address: str = "") -> Tenant | None:
    """Return the tenant of a key that was let in lately; None of others."""
    try:
        parts = _parse_header(header)
        kept = _keys.kept(parts.public_id)
        principal = None if kept is None else _let_in(kept.value[0], parts, address)
    except ApiError:
        return None
    return None if principal is None else principal.tenant


def _let_in(api_key: ApiKey, parts: keys.KeyParts, address: str) -> Principal | None:
    """Return the principal of a key from memory; None if this is another, or another secret."""
    is_same = api_key.environment == parts.environment
    if not is_same or pepper_change.matching(api_key, parts) is None:
        return None
    return _check_key(api_key, address)


def session_principal(request: HttpRequest) -> Principal | None:
    """Return the signed-in person in the tenant they work for; None when there is none.

    The tenant is the session's, else the one they joined first. Raises PermissionDenied when it is
    suspended, SecondFactorRequired when it requires a second factor that the person does not have.
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
    """Lets Django REST framework use `authenticate`. Only without a header it tries the session."""

    def authenticate(self, request: Request) -> tuple[Principal, Principal] | None:
        header = request.headers.get("Authorization")
        if header is None:
            return None
        principal = authenticate(header, request.META.get("REMOTE_ADDR") or "")
        return principal, principal

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class ConsoleSessionAuthentication(SessionAuthentication):
    """Authenticates by a person's session; writes need the CSRF token."""

    def authenticate(self, request: Request) -> tuple[Principal, Principal] | None:  # type: ignore[override]
        principal = session_principal(request._request)
        if principal is None:
            return None
        self.enforce_csrf(request)
        return principal, principal


def forget_key(public_id: str) -> None:
    """Drop a key from this process's cache, so that its revocation takes effect here at once."""
    _keys.forget(public_id)


def bearer(header: str) -> str:
    """Return the credentials of an Authorization header. Raises AuthenticationFailed."""
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() != "bearer":
        raise AuthenticationFailed(
            "The Authorization header is malformed. Send the key as Authorization: Bearer <key>."
        )
    return credentials.strip()


def _parse_header(header: str | None) -> keys.KeyParts:
    if not header:
        raise AuthenticationFailed(
            "No API key was provided. Send it in the header Authorization: Bearer <key>."
        )
    parts = keys.parse(bearer(header))
    if parts is None:
        raise AuthenticationFailed(_WRONG_KEY)
    if parts.environment == keys.OPERATORS:
        raise AuthenticationFailed(
            "This is an operator's service key. Only /ops/v1 accepts it.", code="wrong_key_kind"
        )
    return parts


def _key_rows(parts: keys.KeyParts) -> QuerySet[ApiKey]:
    """Return the query of the key's row."""
    rows = ApiKey.objects.filter(public_id=parts.public_id, environment=parts.environment)
    return rows.select_related("tenant", "owner__user", "service_account")


def _check_key(api_key: ApiKey, address: str) -> Principal:
    principal = standing_principal(api_key)
    if not allows_address(api_key.allowed_ips, address):
        raise PermissionDenied(
            "This API key may not be used from your address.", code="address_not_allowed"
        )
    return principal


def key_permissions(api_key: ApiKey) -> frozenset[Permission]:
    """Return what a key can do: its scopes, as far as its owner's role and its models allow."""
    found = frozenset(map(Permission, api_key.scopes)) & PERMISSIONS[_key_role(api_key)]
    return found - OF_ALL_MODELS if api_key.allowed_models else found


def _key_role(api_key: ApiKey) -> Role:
    holder = api_key.owner or api_key.service_account
    return OWNERLESS_KEY_ROLE if holder is None else Role(holder.role)


def _check_tenant(tenant: Tenant) -> None:
    if tenant.status != Tenant.Status.ACTIVE:
        raise PermissionDenied(f"{tenant.name} is suspended.", code="tenant_suspended")


def touch_is_due(principal: Principal) -> bool:
    """Return whether this use of a key must be noted: the last note is old enough."""
    assert principal.api_key is not None
    last = principal.api_key.last_used_at
    return last is None or last < timezone.now() - _TOUCH_INTERVAL


def touch(principals: Iterable[Principal]) -> None:
    """Note that their keys are used now, unless that was just noted. Raises django.db.Error."""
    now = timezone.now()
    is_due = Q(last_used_at=None) | Q(last_used_at__lt=now - _TOUCH_INTERVAL)
    used = [principal.api_key.pk for principal in principals if principal.api_key is not None]
    with all_tenants(reason="keys of many tenants are used"):
        ApiKey.objects.filter(is_due, pk__in=used).update(last_used_at=now)
