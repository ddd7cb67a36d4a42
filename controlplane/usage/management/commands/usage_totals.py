"""Compare the totals by hour and day with the usage records that they sum up."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.usage.totals import usage_drift, usage_totals_rebuild


class Command(BaseCommand):
    help = "Print each total that differs from its records as a line of JSON; exit with 1 if any."
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--rebuild", action="store_true", help="first recompute all totals")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["rebuild"]:
            usage_totals_rebuild()
        found = usage_drift()
        for drift in found:
            self.stdout.write(json.dumps(dataclasses.asdict(drift), default=str))
        if found:
            raise CommandError(f"{len(found)} totals differ from the sums of their records.")
