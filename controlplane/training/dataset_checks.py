"""Datasets that one process checks at this moment: a tenant's many keep nobody else from theirs."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections import Counter
from collections.abc import Iterator

from controlplane.errors import RateLimited

#: One tenant's, in one process. The checks need the interpreter, of which there is one.
MAX_TENANT = 2

_lock = threading.Lock()
_now: Counter[uuid.UUID] = Counter()


@contextlib.contextmanager
def place(tenant_id: uuid.UUID) -> Iterator[None]:
    """One of the tenant's places. Raises RateLimited when all are taken."""
    with _lock:
        if _now[tenant_id] >= MAX_TENANT:
            raise RateLimited(
                f"{MAX_TENANT} datasets of your organization are checked at this moment: send this "
                "one again in some seconds.",
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
