"""`manage.py batch_runner`: work on batches until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from controlplane.files.batches.runner import Runner
from controlplane.infra import metrics

log = logging.getLogger(__name__)


class Command(BaseCommand):
    help = "Answer the lines of batches with places that other requests leave free."
    requires_system_checks = []  # `migrate` has run them

    def handle(self, *args: Any, **options: Any) -> None:
        asyncio.run(_run())


async def _run() -> None:
    runner = Runner(max_in_flight=settings.BATCH_MAX_IN_FLIGHT)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runner.stop.set)
    metrics.serve("database", "redis", "object store")
    log.info("the batch runner is up")
    await runner.run()
