"""The headers of an answer that announce its model's end."""

from __future__ import annotations

import datetime as dt
from email.utils import format_datetime

from controlplane.inference.access import ServedModel


def lifetime_headers(model: ServedModel) -> dict[str, str]:
    """Return `Deprecation` (RFC 9745) and `Sunset` (RFC 8594), each if it applies.

    Of a blend, the earliest.
    """
    deprecated = [each.deprecated_at for each in model.models if each.deprecated_at]
    dates = [each.shutdown_date for each in model.models if each.shutdown_date]
    headers = {}
    if deprecated:
        headers["Deprecation"] = f"@{int(min(deprecated).timestamp())}"
    if dates:
        midnight = dt.datetime.combine(min(dates), dt.time.min, dt.UTC)
        headers["Sunset"] = format_datetime(midnight, usegmt=True)
    return headers
