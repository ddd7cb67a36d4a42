"""Limit how many datasets of one tenant a process checks at a time, so that others can proceed."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Iterator

from controlplane.errors import RateLimited

#: Per tenant and process: the checks share the interpreter's lock.
MAX_TENANT = 2

_lock = threading.Lock()
_now: Counter[uuid.UUID] = Counter()


@contextlib.contextmanager
def place(tenant_id: uuid.UUID) -> Iterator[None]:
    """Hold one of the tenant's places. Raises RateLimited when all are taken."""
    with _lock:
        if _now[tenant_id] >= MAX_TENANT:
            raise RateLimited(
                f"{MAX_TENANT} datasets of your organization are being checked. Send this one "
                "again in a few seconds.",
                code="too_many_dataset_checks",
                retry_after_s=5,
            )
        _now[tenant_id] += 1
    try:
        yield
    finally:
        with _lock:
            _now[tenant_id] -= 1
            if not _now[tenant_id]:
                del _now[tenant_id]
