"""Authentication of an operator: a person with a session, or a service key."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
from typing import ClassVar

from django.core.cache import cache
from django.db.models import Q
from django.utils import timezone
from redis.exceptions import RedisError

from controlplane.errors import (
    AuthenticationFailed,
    PermissionDenied,
    RateLimited,
    Unavailable,
)
from controlplane.operator.service_keys.models import ServiceKey
from controlplane.operator.service_keys.scopes import Scope, allowed_by
from controlplane.tenancy.scoping import all_tenants
from controlplane.tenants import keys, pepper_change
from controlplane.tenants.auth import bearer
from controlplane.tenants.key_rules import allows_address
from controlplane.tenants.models import User

#: Most requests of a service key, counted from the start of each minute.
MAX_PER_MINUTE = 600
#: Least interval between writes of a key's `last_used_at`.
_TOUCH_INTERVAL = dt.timedelta(minutes=1)
_WRONG_KEY = "Incorrect service key provided."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An authenticated operator: exactly one of `user` and `service_key` is set."""

    user: User | None = None
    service_key: ServiceKey | None = None
    #: Django REST framework reads this from `request.user`.
    is_authenticated: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """Return the caller's name in records: `ops:<public id>` or `user:<id>`."""
        if self.service_key is not None:
            return f"ops:{self.service_key.public_id}"
        return f"user:{self.user.pk if self.user else ''}"

    def may(self, *scopes: Scope) -> bool:
        """Return whether any of the scopes is the operator's; a person has all."""
        if self.service_key is None:
            return True
        return not allowed_by(self.service_key.scopes).isdisjoint(scopes)

    def check(self, *scopes: Scope, param: str | None = None) -> None:
        """Check that the operator has one of the scopes. Raises PermissionDenied.

        scopes  none: only people may do it
        """
        if self.may(*scopes):
            return
        if not scopes:
            raise PermissionDenied(
                "A service key cannot do this: sign in as an operator.",
                code="operator_session_required",
            )
        wanted = " or ".join(dict.fromkeys(scopes))
        raise PermissionDenied(
            f"This service key needs the scope {wanted}.", param=param, code="insufficient_scope"
        )


def authenticate(header: str, address: str) -> Operator:
    """Return the operator of an Authorization header that came from `address`.

    Raises AuthenticationFailed for a key that is malformed, unknown, expired, revoked or a
    tenant's, PermissionDenied for an address that it does not allow, RateLimited, and Unavailable
    when Redis, which counts its requests, does not answer.
    """
    parts = keys.parse(bearer(header))
    if parts is None:
        raise AuthenticationFailed(_WRONG_KEY)
    if parts.environment != keys.OPERATORS:
        raise AuthenticationFailed(
            "This is a tenant's API key. /ops/v1 accepts operators' service keys only.",
            code="wrong_key_kind",
        )
    with all_tenants(reason="service keys belong to no tenant"):
        service_key = ServiceKey.objects.filter(public_id=parts.public_id).first()
        secret = None if service_key is None else pepper_change.matching(service_key, parts)
        if service_key is None or secret is None:
            raise AuthenticationFailed(_WRONG_KEY)
        _check(service_key, address)
        pepper_change.renew(service_key, parts, secret)
        _touch(service_key)
    return Operator(service_key=service_key)


def _check(service_key: ServiceKey, address: str) -> None:
    if service_key.revoked_at is not None:
        raise AuthenticationFailed("This service key has been revoked: use another one.")
    if service_key.expires_at is not None and service_key.expires_at <= timezone.now():
        raise AuthenticationFailed("This service key has expired: use another one.")
    if not allows_address(service_key.allowed_ips, address):
        raise PermissionDenied(
            "This service key may not be used from your address.", code="address_not_allowed"
        )
    _count(service_key)


def _count(service_key: ServiceKey) -> None:
    """Count a request in its minute. Raises RateLimited, Unavailable."""
    minute, second = divmod(int(time.time()), 60)
    name = f"service-key:{service_key.public_id}:{minute}"
    try:
        cache.add(name, 0, timeout=120)
        number = cache.incr(name)
    except RedisError as error:
        raise Unavailable("Redis does not answer.") from error
    if number > MAX_PER_MINUTE:
        raise RateLimited(
            f"A service key may make {MAX_PER_MINUTE} requests a minute: wait.",
            retry_after_s=60 - second,
        )


def _touch(service_key: ServiceKey) -> None:
    now = timezone.now()
    is_due = Q(last_used_at=None) | Q(last_used_at__lt=now - _TOUCH_INTERVAL)
    ServiceKey.objects.filter(is_due, pk=service_key.pk).update(last_used_at=now)
