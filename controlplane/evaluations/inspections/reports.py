"""Figures for the doctor's report, computed from stored ones."""

from __future__ import annotations

from controlplane.adapters.models import AdapterVersion

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def device_bytes(version: AdapterVersion) -> int | None:
    """Return the memory of a version's weights on the device that it was probed on.

    The worker that was probed told it. If it did not, see `is_estimated`, it follows from the
    number of parameters and the worker's dtype; then the worker takes up to an eighth of a page
    more. None: not known yet.
    """
    inspection = getattr(version, "inspection", None)
    if inspection is not None and inspection.probe.get("device_bytes"):
        return int(inspection.probe["device_bytes"])
    item_bytes = _ITEM_BYTES.get(inspection.probe.get("dtype", "") if inspection else "")
    num_parameters = version.report.get("num_parameters")
    if item_bytes is None or not num_parameters:
        return None
    return int(num_parameters) * item_bytes


def is_estimated(version: AdapterVersion) -> bool:
    """Return whether `device_bytes` is computed, as no worker has told it."""
    inspection = getattr(version, "inspection", None)
    return inspection is None or not inspection.probe.get("device_bytes")
