"""Count stored values by pepper, as one line of JSON; exit code 1 if some are unreadable.

--reencrypt first moves all values but API keys to the current pepper; API keys move when they
are used. When `needs_accepted` is 0, a day after the change, LORIKEET_ACCEPTED_PEPPERS can be
emptied.
"""

import dataclasses
import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.maintenance.pepper import pepper_status, reencrypt


class Command(BaseCommand):
    help = __doc__
    requires_system_checks = []  # `migrate` has run them

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--reencrypt", action="store_true")

    def handle(self, *, reencrypt: bool, **options: Any) -> None:
        if reencrypt:
            _reencrypt()
        status = pepper_status()
        report = dataclasses.asdict(status)
        report |= {"needs_accepted": status.needs_accepted, "unreadable": status.unreadable}
        self.stdout.write(json.dumps(report))
        if status.unreadable:
            raise CommandError(
                f"{status.unreadable} values are under a pepper that is not configured: put it "
                "into LORIKEET_ACCEPTED_PEPPERS"
            )


_reencrypt = reencrypt
