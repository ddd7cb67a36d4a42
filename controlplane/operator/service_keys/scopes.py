"""The scopes of service keys."""

from __future__ import annotations

import enum
from collections.abc import Iterable


class Scope(enum.StrEnum):
    """A scope; a write scope also allows reading the same objects.

    `tenants:read` allows reading everything under /ops/v1/tenants except prompts.
    """

    TENANTS_READ = "tenants:read"
    TENANTS_WRITE = "tenants:write"
    KEYS_WRITE = "keys:write"
    ADAPTERS_WRITE = "adapters:write"
    DATASETS_WRITE = "datasets:write"
    TRAINING_WRITE = "training:write"
    POOL_READ = "pool:read"
    POOL_WRITE = "pool:write"


SCOPES = tuple(scope.value for scope in Scope)
#: Scope -> the scopes that it implies.
_IMPLIED = {
    Scope.TENANTS_WRITE: Scope.TENANTS_READ,
    Scope.POOL_WRITE: Scope.POOL_READ,
}


def allowed_by(scopes: Iterable[str]) -> frozenset[Scope]:
    """Return the scopes of a key, with those that they imply."""
    own = frozenset(map(Scope, scopes))
    return own | {_IMPLIED[scope] for scope in own if scope in _IMPLIED}
