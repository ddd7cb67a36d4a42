"""`manage.py usage_totals`: compare the totals by hour and day with the records they sum up."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.usage.totals import usage_drift, usage_totals_rebuild


class Command(BaseCommand):
    help = "Print every total that its records do not bear out, a line of JSON each; 1 if any."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--rebuild", action="store_true", help="first make them all anew")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["rebuild"]:
            usage_totals_rebuild()
        found = usage_drift()
        for drift in found:
            self.stdout.write(json.dumps(dataclasses.asdict(drift), default=str))
        if found:
            raise CommandError(f"{len(found)} totals are not the sums of their records.")
