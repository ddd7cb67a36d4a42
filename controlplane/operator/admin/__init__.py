"""The operator's pages: each module registers its pages when it is imported."""

from controlplane.operator.admin import (  # noqa: F401
    adapters,
    deletion,
    inference,
    tenants,
    training,
    usage,
)
