"""`manage.py accountant`: settle usage until SIGTERM or SIGINT."""

from __future__ import annotations

import logging
import signal
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from controlplane.infra import metrics
from controlplane.queue.accountant import Accountant

log = logging.getLogger(__name__)


class Command(BaseCommand):
    help = "Write the workers' terminal records to the database."
    requires_system_checks = []  # `migrate` has run them

    def handle(self, *args: Any, **options: Any) -> None:
        accountant = Accountant(settings.REDIS_URL, settings.POOL)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: accountant.stop.set())
        metrics.serve("database", "redis", reads_installation=True)
        log.info("the accountant is up")
        accountant.run()
