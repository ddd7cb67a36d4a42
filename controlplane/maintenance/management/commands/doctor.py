"""Check the installation: print what is wrong and what to do; exit code 1 if something fails.

It takes at most 10 s and leaves nothing behind. Run it where the web process runs: `docker compose
exec web python manage.py doctor`. --json prints {"status", "findings": [{"check", "status",
"message", "advice"}]}. --mail-to ADDRESS sends one mail.
"""

import dataclasses
import functools
import json
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from controlplane.maintenance.doctor import machine, platform, servers
from controlplane.maintenance.doctor.examination import Check, Finding, Status, examine

_SIGNS = {Status.OK: "ok", Status.WARNING: "warn", Status.FAILURE: "FAIL"}


class Command(BaseCommand):
    help = __doc__
    # Checks would need the database.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--mail-to", metavar="ADDRESS")

    def handle(self, *, mail_to: str | None, **options: Any) -> None:
        findings = examine(_checks(mail_to))
        worst = max((finding.status for finding in findings), key=list(Status).index)
        if options["json"]:
            report = [dataclasses.asdict(finding) for finding in findings]
            self.stdout.write(json.dumps({"status": worst, "findings": report}))
        else:
            self._print(findings)
        if worst == Status.FAILURE:
            raise SystemExit(1)

    def _print(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.stdout.write(f"{_SIGNS[finding.status]:5}{finding.check:12}{finding.message}")
            if finding.advice:
                self.stdout.write(f"{'':17}-> {finding.advice}")
        counts = {status: sum(f.status == status for f in findings) for status in Status}
        self.stdout.write(
            f"{counts[Status.FAILURE]} failures, {counts[Status.WARNING]} warnings, "
            f"{counts[Status.OK]} ok"
        )


def _checks(mail_to: str | None) -> list[Check]:
    return [
        ("roles", servers.roles),
        ("policies", servers.walls),
        ("migrations", servers.migrations),
        ("redis", servers.queue),
        ("broker", servers.broker),
        ("store", servers.store),
        ("uploads", servers.uploads),
        ("clocks", servers.clocks),
        ("models", platform.base_models),
        ("workers", platform.pool),
        ("precision", platform.precision),
        ("processes", platform.processes),
        ("celery", platform.celery),
        ("pepper", platform.pepper),
        ("mail", functools.partial(machine.mail, mail_to)),
        ("disks", machine.disks),
        ("addresses", machine.addresses),
    ]
