"""Deleted adapters, which workers must drop from the disk, host memory and GPU pages.

    gone:{p}    zset    digest -> when it was deleted, Unix seconds

A worker that runs is told by `Control.FORGET`. One that was away reads the key at its start, and
drops from its disk what was fetched longer than ADAPTER_AGE_S ago: the key names a deleted adapter
for longer than that. So no deleted adapter outlives a worker's absence.
"""

from __future__ import annotations

ADAPTER_AGE_S = 30 * 24 * 3600
GONE_TTL_S = ADAPTER_AGE_S + 24 * 3600


def gone_key(pool: str) -> str:
    return f"gone:{{{pool}}}"
