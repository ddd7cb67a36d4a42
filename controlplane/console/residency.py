"""Where the workers have a version, and what they loaded before a switch, for the pages."""

from __future__ import annotations

from controlplane.adapters.models import AdapterVersion
from controlplane.errors import Unavailable
from controlplane.queue.residency import Prefetched, Residency, residency


def residency_of(version: AdapterVersion | None) -> Residency | None:
    """Return where the workers have a ready version; None without workers, or without Redis."""
    if version is None or version.status != AdapterVersion.Status.READY:
        return None
    try:
        [found] = residency([version])
    except Unavailable:
        return None
    return found if found.places else None


def prefetched_text(loaded: Prefetched | None) -> str:
    """Return what to say if not all workers had loaded what they answer with from now on."""
    if loaded is None or loaded.ready == loaded.workers:
        return ""
    return f"{loaded.ready} of {loaded.workers} workers had loaded it by then."
