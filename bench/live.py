"""Starts the platform for benchmarks of a gateway: real servers, no data kept."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from demo.stack import EmbeddedStack
from tests.live import LiveStack, live_stack


@contextlib.contextmanager
def live_platform() -> Iterator[LiveStack]:
    """Run PostgreSQL, Redis, an object store and two tenants until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "live").mkdir()
        with EmbeddedStack(root / "stack", durable=False) as stack:
            with live_stack(stack.env, root / "live") as live:
                yield live
