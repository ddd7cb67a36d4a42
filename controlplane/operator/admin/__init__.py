"""The operator's pages of rows. Django imports this package; each module registers its pages."""

from controlplane.operator.admin import (  # noqa: F401
    adapters,
    inference,
    tenants,
    training,
    usage,
)
