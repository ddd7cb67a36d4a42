"""An operator in a tenant: the principal for the tenant's own services and views."""

from __future__ import annotations

import dataclasses

from controlplane.operator.service_keys.auth import Operator
from controlplane.operator.service_keys.models import ServiceKey
from controlplane.tenants.auth import Permission, Principal
from controlplane.tenants.models import Role, Tenant


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPrincipal(Principal):
    """A person or a service key that acts for the tenant; no member of it.

    The audit trail has the operator as the actor.
    """

    service_key: ServiceKey | None = None
    #: Its permissions here, regardless of a member's role.
    allowed: frozenset[Permission] = frozenset()

    @classmethod
    def of(
        cls, operator: Operator, tenant: Tenant, allowed: frozenset[Permission]
    ) -> OperatorPrincipal:
        return cls(
            tenant=tenant,
            role=Role.OWNER,  # only for messages: `allowed` decides
            user=operator.user,
            service_key=operator.service_key,
            allowed=allowed,
        )

    @property
    def permissions(self) -> frozenset[Permission]:
        return self.allowed

    @property
    def label(self) -> str:
        return Operator(user=self.user, service_key=self.service_key).label
