"""References that tell workers where an adapter's files are."""

from __future__ import annotations

from contract.messages.protocol import AdapterRef
from controlplane.adapters.models import AdapterVersion


def adapter_ref(version: AdapterVersion, weight: float = 1.0) -> AdapterRef:
    """Return the reference to a ready version, as jobs and prefetches have it."""
    return AdapterRef(
        digest=version.digest,
        config_key=version.config_key,
        tensors_key=version.tensors_key,
        num_bytes=version.num_bytes,
        weight=weight,
    )
