"""The places of a version on the workers, and their loads before a switch, for the pages."""

from __future__ import annotations

from controlplane.adapters.models import AdapterVersion
from controlplane.errors import Unavailable
from controlplane.queue.placement.residency import Prefetched, Residency, residency


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
    """Return a note if some workers had not loaded the new live version; else ""."""
    if loaded is None or loaded.ready == loaded.workers:
        return ""
    return f"{loaded.ready} of {loaded.workers} workers had loaded it by then."
