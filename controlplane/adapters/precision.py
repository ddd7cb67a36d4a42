"""The precision in which workers that keep adapters in FP8 answer with a version.

Its copy in FP8 is made by each worker from the original, which the store keeps as it came. The copy
answers once a probe has found it good enough (`AdapterVersion.is_in_fp8`). All act for the
tenant in scope; gateways see a change within half a second, and running requests finish as they
began.
"""

from __future__ import annotations

from django.db import transaction

from controlplane.adapters.models import AdapterVersion
from controlplane.events.audit.services import record


@transaction.atomic
def version_original_set(*, version: AdapterVersion, keeps_original: bool) -> AdapterVersion:
    """Say whether a version answers with its original even where its copy would do."""
    rows = AdapterVersion.objects.filter(pk=version.pk).exclude(keeps_original=keeps_original)
    if rows.update(keeps_original=keeps_original):
        named = {"adapter": version.adapter.name, "number": version.number}
        before = {"keeps_original": not keeps_original}
        after = named | {"keeps_original": keeps_original}
        record("precision_set", version, before=before, after=after)
    version.keeps_original = keeps_original
    return version
